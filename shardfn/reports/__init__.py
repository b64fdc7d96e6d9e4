"""The report of a step: one page that opens in a browser, without a network."""
