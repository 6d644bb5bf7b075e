"""What the scripts share: options, chats, outputs, and the frame of `main`."""
