"""What the scripts share: options, outputs, and the frame of `main`."""
