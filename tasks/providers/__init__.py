"""Where machines come from: one module a provider, all behind the protocols of `base`."""
