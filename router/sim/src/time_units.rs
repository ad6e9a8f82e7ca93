//! Virtual time: microseconds from the trace's beginning.

use plait_core::Micros;

/// The nearest whole microseconds; 0 for negative numbers.
pub(crate) fn micros(micros: f64) -> Micros {
    #[expect(clippy::cast_sign_loss, reason = "the cast saturates")]
    Micros(micros.round() as u64)
}

/// Microseconds as seconds.
pub(crate) fn seconds(micros: u64) -> f64 {
    micros as f64 / 1e6
}
