//! Requests that hold no pages, waiting or preempted, in order of admission.

use std::collections::{BTreeMap, BTreeSet};

use crate::fair_share::{FairShare, VirtualTime};
use crate::ids::{Micros, RequestId, TenantId};
use crate::queue_limits::QueueLimits;
use crate::request::Rejected;
use crate::settings::Policy;
use crate::state::{Job, Order, Queued};

/// A request's key in the queue.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueKey {
    /// The tenant; the same for all requests unless the policy is fair share.
    pub(crate) lane: TenantId,
    pub(crate) order: Order,
}

/// The first request of a lane, ordered between lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Head {
    /// The tenant's virtual time when the lane was last looked at. It may be later by now.
    time: VirtualTime,
    order: Order,
    lane: TenantId,
}

/// One tenant's requests in order. A lane is never empty.
#[derive(Clone, Debug)]
struct Lane {
    requests: BTreeMap<Order, Queued>,
    head: Head,
}

/// Waiting and preempted requests, each lane in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queue {
    lanes: BTreeMap<TenantId, Lane>,
    heads: BTreeSet<Head>,
    pub(crate) room: QueueLimits,
    /// Requests that have not run yet, nor has another choice of their prompt, by arrival. Only these leave unserved: an
    /// answer of which a part has begun comes whole.
    unserved: BTreeSet<(Micros, RequestId)>,
    /// None unless the policy is fair share.
    pub(crate) fair_share: Option<FairShare>,
    /// Requests so far, which number the next one.
    pub(crate) num_submitted: u64,
    /// Requests that left the queue unserved since the caller last asked.
    pub(crate) rejected: Vec<Rejected>,
    /// Requests that were preempted since the last plan was begun.
    pub(crate) preempted: Vec<RequestId>,
}

impl Queue {
    pub(crate) fn new(policy: Policy) -> Self {
        Self {
            fair_share: (policy == Policy::Fair).then(FairShare::default),
            ..Self::default()
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    /// The lane of a request.
    pub(crate) fn lane_of(&self, job: &Job) -> TenantId {
        match self.fair_share {
            Some(_) => job.tenant(),
            None => TenantId::default(),
        }
    }

    pub(crate) fn push(&mut self, lane: TenantId, queued: Queued) {
        self.room.add(lane, queued.job());
        let order = queued.job().order;
        if let Queued::Waiting { job, since } = &queued {
            self.unserved.insert((*since, job.id()));
        }
        if !self.lanes.contains_key(&lane) {
            self.start_waiting(lane);
        }
        let head = Head {
            time: VirtualTime::default(),
            order,
            lane,
        };
        let entry = self.lanes.entry(lane).or_insert_with(|| Lane {
            requests: BTreeMap::new(),
            head,
        });
        entry.requests.insert(order, queued);
        let head = Head {
            order: order.min(entry.head.order),
            ..entry.head
        };
        self.move_head(head);
    }

    /// A lane that was empty gets a request.
    fn start_waiting(&mut self, lane: TenantId) {
        self.first();
        if let Some(fair_share) = &mut self.fair_share {
            fair_share.start_waiting(lane);
        }
    }

    /// The head of the queue: the first request of the lane whose tenant's virtual time is least.
    ///
    /// Virtual times only grow. A lane that seems first but was served since is re-inserted; the others
    /// are not visited.
    pub(crate) fn first(&mut self) -> Option<QueueKey> {
        loop {
            let first = self.heads.first().copied();
            let Some(fair_share) = &mut self.fair_share else {
                return first.map(Head::key);
            };
            let time = first.map(|head| fair_share.time(head.lane));
            match first.zip(time) {
                Some((head, time)) if time != head.time => self.move_head(Head { time, ..head }),
                _ => {
                    fair_share.catch_up(time);
                    return first.map(Head::key);
                }
            }
        }
    }

    /// This choice of a prompt runs: the others, which came with it, are kept until they do.
    pub(crate) fn keep_choices(&mut self, running: &Queued) {
        let Queued::Waiting { job, since } = running else {
            return;
        };
        let choices = job.choices();
        let choices = (*since, choices.start)..(*since, choices.end);
        while let Some(choice) = self.unserved.range(choices.clone()).next().copied() {
            self.unserved.remove(&choice);
        }
    }

    /// The unserved requests at the end of a lane, last first. Preempted ones come before them.
    pub(crate) fn unserved_backwards(
        &self,
        lane: TenantId,
    ) -> impl Iterator<Item = (QueueKey, &Job)> {
        let requests = self.lanes.get(&lane).into_iter();
        let backwards = requests.flat_map(|lane| lane.requests.iter().rev());
        let waiting = backwards.map_while(move |(order, queued)| match queued {
            Queued::Waiting { job, since } => Some((
                QueueKey {
                    lane,
                    order: *order,
                },
                &**job,
                *since,
            )),
            Queued::Preempted { .. } => None,
        });
        waiting
            .filter(|(_, job, since)| self.unserved.contains(&(*since, job.id())))
            .map(|(key, job, _)| (key, job))
    }

    /// The first requests of a queue with one lane, in order.
    pub(crate) fn leading(&mut self, num: usize) -> impl Iterator<Item = (QueueKey, &mut Queued)> {
        let lanes = self.lanes.iter_mut();
        let all = lanes.flat_map(|(lane, requests)| {
            let keys = requests.requests.iter_mut();
            keys.map(|(order, queued)| {
                let (lane, order) = (*lane, *order);
                (QueueKey { lane, order }, queued)
            })
        });
        all.take(num)
    }

    /// Changes every request.
    pub(crate) fn for_each(&mut self, change: fn(&mut Job)) {
        let lanes = self.lanes.values_mut();
        let all = lanes.flat_map(|lane| lane.requests.values_mut());
        all.for_each(|queued| change(queued.job_mut()));
    }

    /// The request behind another one: the next of its lane, else the first of the next lane.
    pub(crate) fn after(&self, key: QueueKey) -> Option<QueueKey> {
        use std::ops::Bound::{Excluded, Unbounded};
        let lane = self.lanes.get(&key.lane)?;
        let mut behind = lane.requests.range((Excluded(key.order), Unbounded));
        if let Some((order, _)) = behind.next() {
            let order = *order;
            return Some(QueueKey { order, ..key });
        }
        let head = self.heads.range((Excluded(lane.head), Unbounded)).next()?;
        Some(head.key())
    }

    /// Re-inserts a lane under its current head.
    fn move_head(&mut self, head: Head) {
        if let Some(lane) = self.lanes.get_mut(&head.lane) {
            self.heads.remove(&lane.head);
            self.heads.insert(head);
            lane.head = head;
        }
    }

    /// Of the unserved requests, the one that came first.
    pub(crate) fn oldest_unserved(&self) -> Option<RequestId> {
        self.unserved.first().map(|(_, request)| *request)
    }

    pub(crate) fn get(&self, key: QueueKey) -> Option<&Queued> {
        self.lanes.get(&key.lane)?.requests.get(&key.order)
    }

    pub(crate) fn job(&self, key: QueueKey) -> Option<&Job> {
        self.get(key).map(Queued::job)
    }

    pub(crate) fn job_mut(&mut self, key: QueueKey) -> Option<&mut Job> {
        let lane = self.lanes.get_mut(&key.lane)?;
        Some(lane.requests.get_mut(&key.order)?.job_mut())
    }

    pub(crate) fn remove(&mut self, key: QueueKey) -> Option<Queued> {
        let lane = self.lanes.get_mut(&key.lane)?;
        let queued = lane.requests.remove(&key.order)?;
        match lane.requests.first_key_value() {
            Some((order, _)) => {
                let head = Head {
                    order: *order,
                    ..lane.head
                };
                self.move_head(head);
            }
            None => {
                self.heads.remove(&lane.head);
                self.lanes.remove(&key.lane);
            }
        }
        if let Queued::Waiting { job, since } = &queued {
            self.unserved.remove(&(*since, job.id()));
        }
        self.room.remove(key.lane, queued.job());
        Some(queued)
    }
}

impl Head {
    fn key(self) -> QueueKey {
        let Self { lane, order, .. } = self;
        QueueKey { lane, order }
    }
}
