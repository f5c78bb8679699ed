"""What every report is made with: formats of numbers, tables, plots, pages."""
