//! Plait's wire.
