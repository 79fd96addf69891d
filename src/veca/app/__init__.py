"""The live page: a photo, a budget slider, and what changes when it moves.

`model_cache` holds the weights, `content` computes pictures and numbers (no web code), `page`
lays them out with gradio, `serve` runs the page. Nothing else in the package imports this.
"""
