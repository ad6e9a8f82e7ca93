//! Masks that come late.

use std::collections::{BTreeMap, BTreeSet};

use plait_core::{RequestId, StepId};

use crate::oracle;

/// Which masks are late.
#[derive(Clone, Debug, Default)]
pub struct Masks {
    pub lateness: Lateness,
    /// Requests that wait for a mask.
    pub late: BTreeSet<RequestId>,
    /// Requests whose late mask has come, until they sample.
    pub come: BTreeSet<RequestId>,
    /// The step in which a request's row was left out last.
    pub last: BTreeMap<RequestId, StepId>,
}

/// When a mask is late that is not there yet.
#[derive(Clone, Copy, Debug, Default)]
pub enum Lateness {
    /// One of three.
    #[default]
    Sometimes,
    Always,
    Never,
}

impl Masks {
    /// The device is gone. A row asks anew for its mask.
    pub fn forget_steps(&mut self) {
        self.late.clear();
        self.last.clear();
    }

    /// Requests whose mask may come: that it is late is known when its step is the oldest in flight.
    pub fn awaited(&self, oldest: Option<StepId>) -> Vec<RequestId> {
        let is_known = |request: &&RequestId| oldest.is_none_or(|it| it >= self.last[*request]);
        self.late.iter().filter(is_known).copied().collect()
    }

    /// Whether a row samples nothing. `oldest` is the oldest step in flight.
    pub fn leaves_out(&mut self, request: RequestId, step: StepId, oldest: Option<StepId>) -> bool {
        let last = self.last.get(&request).copied();
        let follows_late_row = last.is_some_and(|last| oldest.is_some_and(|it| it <= last));
        if follows_late_row {
            return true;
        }
        let is_late = self.late.contains(&request)
            || !self.come.contains(&request)
                && match self.lateness {
                    Lateness::Sometimes => oracle::mix(step.0, request.0).is_multiple_of(3),
                    Lateness::Always => true,
                    Lateness::Never => false,
                };
        if is_late {
            self.late.insert(request);
            self.last.insert(request, step);
        } else {
            self.come.remove(&request);
        }
        is_late
    }
}
