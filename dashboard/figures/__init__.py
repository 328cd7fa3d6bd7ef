"""Figures: pure functions from frames to what plotly, a chart or a raster draws."""
