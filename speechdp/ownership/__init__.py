"""One job a folder: who owns it, whether that job is gone, and beginning a folder anew."""
