"""Guards taken out one by one: does a test fail?"""
