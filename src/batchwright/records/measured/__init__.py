"""Records of single measurements, of which a profile consists."""
