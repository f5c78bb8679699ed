"""Synthetic speech by eSpeak NG: who says what, and when each phone was spoken."""
