"""From logits to tokens: processors, sampling warpers, and the selection that runs them in one compiled call."""
