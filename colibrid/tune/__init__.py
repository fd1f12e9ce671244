"""The search for the expert capacity that suits a model, a text and a limit: `colibrid tune`."""
