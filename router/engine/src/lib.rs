//! Text, link and driver around Plait's scheduler.
