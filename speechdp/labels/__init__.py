"""What frames and texts are labelled with: pronunciations, HMM states, Kaldi pdfs, symbols."""
