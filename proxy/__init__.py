"""The model boundary: answers the harness's model calls, token in and token out, and captures every one of them."""
