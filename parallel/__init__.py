"""One model on several processes, as torchrun starts them."""
