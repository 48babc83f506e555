"""Carries out plans inside other trainers, under their own DDP.

There is a module for each trainer, which imports it; `arrangement` is what they share.
"""
