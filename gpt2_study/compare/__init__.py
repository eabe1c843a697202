"""Two runs beside each other: their steps, one step layer by layer, and a run with itself."""
