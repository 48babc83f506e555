"""Images: sources, stores, decoding, and the pipeline from stored images to batches."""
