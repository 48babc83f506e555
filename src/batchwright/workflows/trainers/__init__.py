"""TRAINERS: plans carried out inside trainers that people stay in, under their own DDP.

Each module is for one of them, and imports it. `arrangement` is what they share.
"""
