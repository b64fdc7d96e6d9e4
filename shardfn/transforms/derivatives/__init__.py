"""Transforms that differentiate, and transforms that control what a backward saves and sends."""
