//! Plait.
