"""HTTP: who may ask, bodies and refusals, and what the handlers of all APIs share"""
