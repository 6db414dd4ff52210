"""How good are models, and ways of buying runs, on what they have not seen. Nothing that answers imports this."""
