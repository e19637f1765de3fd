"""Draws from a distribution: noise, processors, and what a place's noise draws."""
