"""Weight formats: one file each, and how a layer reads its matrix in the first that takes it.

A format implements ``plait_worker.weights.reader.WeightFormat``.
"""
