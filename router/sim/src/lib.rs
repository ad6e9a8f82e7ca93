//! Plait's scheduler driven by traces in virtual time.
