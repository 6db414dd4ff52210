"""The analytic part of a step time: compute of one device, collectives, and the step made of both."""
