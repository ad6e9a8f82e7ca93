//! Text, link and driver around Plait's scheduler.

pub mod text;
