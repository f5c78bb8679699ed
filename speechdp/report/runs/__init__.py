"""Reading folders of runs back as typed records, and the figures that follow from them."""
