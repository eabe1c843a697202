"""The strategy study: a matrix of runs, started one after another, compared and explained."""
