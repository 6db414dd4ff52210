"""What is learned on top of the analytic step time: a Gaussian process over correlated residuals."""
