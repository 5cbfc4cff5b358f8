"""What is read from raw results: the page with its plots, the verdicts on promised ratios, a comparison of checkouts.

Measures nothing. Imports from ``measure`` the names of contenders and of peers.
"""
