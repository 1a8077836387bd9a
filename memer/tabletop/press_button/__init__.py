"""Press button: two buttons, each a given number of times, then a third one to confirm."""
