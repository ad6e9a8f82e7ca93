//! Scheduler, device and clients together; every call is checked against the invariants.
// budget: every call of a scheduler is checked against all invariants in one place

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use plait_core::{
    Event, FinishReason, Micros, Output, PageId, Plan, Policy, PrefillRow, Refusal, RequestId,
    Scheduler, Settings, SlotId, SnapshotId, StepId, StepResult, TokenId,
};

use crate::fake_device::{Computed, FakeDevice, Page, appended};
use crate::masks::Masks;
use crate::oracle;
use crate::slot_memory::{check_counts, check_snapshots};
pub use crate::spec::Spec;

/// What a client has received so far, and what it must receive in the end.
#[derive(Clone, Debug)]
pub struct Client {
    pub spec: Spec,
    pub expected: (Vec<TokenId>, FinishReason),
    pub emitted: Vec<TokenId>,
    pub ended: Option<FinishReason>,
    arrived: u64,
    /// Why it left the queue unserved.
    pub rejected: Option<Refusal>,
    /// Prompt positions whose log-probabilities were reported: `1..` this.
    num_reported: u32,
    /// Of those, what results have brought.
    num_received: u32,
    /// Output tokens after which it ends.
    due: u32,
    /// Losses with a row of it in flight since it last sampled.
    pub num_losses: u32,
}

/// A step in flight.
#[derive(Clone, Debug)]
struct InFlight {
    step: StepId,
    computed: Computed,
    sampling: Vec<RequestId>,
    /// Requests with a row.
    rows: BTreeSet<RequestId>,
    /// Prompt positions that its result brings.
    reported: Vec<(RequestId, u32)>,
    /// Pages that its rows read or write, with whose they are.
    named: BTreeMap<Page, RequestId>,
    /// Snapshots that it restores or saves.
    snapshots: Vec<SnapshotId>,
}

#[derive(Clone, Debug)]
pub struct Harness {
    pub scheduler: Scheduler,
    pub settings: Settings,
    pub clients: BTreeMap<RequestId, Client>,
    device: FakeDevice,
    in_flight: VecDeque<InFlight>,
    slots: BTreeMap<SlotId, RequestId>,
    now: u64,
    pub num_plans: u64,
    /// The device says how long steps took.
    pub measures: bool,
    pub masks: Masks,
    /// Requests whose rows compute NaN from now on.
    pub failing: BTreeSet<RequestId>,
    /// Pages that were computed before the last flush and have not been written again.
    flushed: BTreeSet<Page>,
}

impl Harness {
    pub fn new(settings: Settings) -> Self {
        Self {
            scheduler: Scheduler::new(settings.clone()).unwrap(),
            device: FakeDevice::new(&settings),
            clients: BTreeMap::new(),
            in_flight: VecDeque::new(),
            slots: BTreeMap::new(),
            now: 0,
            num_plans: 0,
            measures: true,
            masks: Masks::default(),
            failing: BTreeSet::new(),
            flushed: BTreeSet::new(),
            settings,
        }
    }

    pub fn submit(&mut self, spec: Spec) -> Result<RequestId, Refusal> {
        Ok(self.submit_all(vec![spec])?[0])
    }

    /// Requests that belong together.
    pub fn submit_all(&mut self, specs: Vec<Spec>) -> Result<Vec<RequestId>, Refusal> {
        self.now += 1;
        let requests = specs.iter().map(Spec::request).collect();
        let ids = self.scheduler.submit_all(requests, Micros(self.now))?;
        self.take_rejected();
        for (id, spec) in ids.iter().zip(specs.into_iter().flat_map(Spec::choices)) {
            self.add_client(*id, spec);
        }
        Ok(ids)
    }

    /// Nothing happens until then.
    pub fn wait_until(&mut self, now: u64) {
        self.now = self.now.max(now);
    }

    /// Requests that left the queue unserved have never run.
    fn take_rejected(&mut self) {
        for rejected in self.scheduler.take_rejected() {
            let client = self.clients.get_mut(&rejected.request).unwrap();
            assert_eq!(client.ended, None, "{rejected:?} has ended before");
            assert!(client.emitted.is_empty(), "{rejected:?} has run");
            client.ended = Some(FinishReason::Abort);
            client.rejected = Some(rejected.refusal);
        }
    }

    fn add_client(&mut self, id: RequestId, spec: Spec) {
        let (num_prompt, settings) = (u32::try_from(spec.prompt.len()).unwrap(), &self.settings);
        let pool = u32::try_from(settings.limits().unwrap().pool_tokens).unwrap();
        let room = settings.runtime.max_model_len.min(pool) - num_prompt;
        let due = spec.max_tokens.min(room);
        let expected = oracle::generate(&spec.prompt, due, &spec.stop_ids, id.0);
        let client = Client {
            spec,
            expected,
            emitted: Vec::new(),
            ended: None,
            arrived: self.now,
            rejected: None,
            num_reported: 1,
            num_received: 1,
            due,
            num_losses: 0,
        };
        assert!(
            self.clients.insert(id, client).is_none(),
            "{id:?} is given out twice"
        );
    }

    /// Plans one step and runs it on the device; its result waits until it is completed.
    pub fn plan(&mut self) -> Option<Plan> {
        let plan = self.plan_only()?;
        self.send(&plan);
        Some(plan)
    }

    /// Plans one step, which is sent later.
    pub fn plan_only(&mut self) -> Option<Plan> {
        self.now += 1;
        let num_preempted_before = self.scheduler.stats().counts.num_preemptions;
        let plan = self.scheduler.plan(Micros(self.now));
        self.take_rejected();
        let plan = plan?;
        self.num_plans += 1;
        let num_preempted = self.scheduler.stats().counts.num_preemptions - num_preempted_before;
        self.check_victims(&plan, num_preempted);
        self.check_limits(&plan);
        Some(plan)
    }

    /// Runs a step on the device.
    pub fn send(&mut self, plan: &Plan) {
        self.check_deltas(plan);
        let left_out = self.left_out(plan);
        let in_use = self.in_flight.iter().flat_map(|step| &step.snapshots);
        let snapshots = check_snapshots(plan, &self.settings, in_use.copied().collect());
        let computed = self.device.step(plan, &left_out);
        self.check_prompt_positions(plan);
        let last_chunks = plan
            .prefill
            .iter()
            .filter(|row| row.is_last_chunk)
            .map(|row| row.request);
        let sampling = last_chunks
            .chain(plan.decode.iter().map(|row| row.request))
            .collect();
        let prefilling = plan.prefill.iter().map(|row| row.request);
        let reported = prefilling.clone();
        let reported = reported.map(|it| (it, self.clients[&it].num_reported));
        let named = computed.named.iter();
        let named = named
            .map(|(page, slot)| (*page, self.slots[slot]))
            .collect();
        self.in_flight.push_back(InFlight {
            step: plan.step,
            computed,
            sampling,
            rows: prefilling
                .clone()
                .chain(plan.decode.iter().map(|row| row.request))
                .collect(),
            reported: reported.collect(),
            named,
            snapshots,
        });
        self.check_pool();
    }

    pub fn num_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Completes the oldest step.
    pub fn complete(&mut self) -> Vec<Output> {
        let completed = self.in_flight.pop_front().expect("a step is on the wire");
        if self.measures {
            self.advance(Event::Measured {
                step: completed.step,
                elapsed: oracle::step_time(completed.step),
            });
        }
        let token_ids = completed
            .computed
            .with_failures(&completed.sampling, &self.failing);
        let result = StepResult {
            step: completed.step,
            num_accepted: &completed.computed.num_accepted,
            token_ids: &token_ids,
        };
        for (request, num_reported) in &completed.reported {
            self.clients.get_mut(request).unwrap().num_received = *num_reported;
        }
        for request in &completed.sampling {
            self.clients.get_mut(request).unwrap().num_losses = 0;
        }
        let outputs = self.advance(Event::Result(result));
        for output in &outputs {
            if let Output::Tokens {
                request,
                sampled_row,
                ..
            } = output
            {
                assert_eq!(
                    completed.sampling[*sampled_row as usize], *request,
                    "the row of another request"
                );
            }
        }
        outputs
    }

    /// The device is gone with all that it had, and the results of the steps in flight. Returns who is not tried again.
    pub fn lose(&mut self) -> Vec<RequestId> {
        let steps = std::mem::take(&mut self.in_flight);
        let suspects: BTreeSet<RequestId> = steps.into_iter().flat_map(|it| it.rows).collect();
        let seeds = std::mem::take(&mut self.device.seeds);
        self.device = FakeDevice::new(&self.settings);
        self.device.seeds = seeds;
        self.slots.clear();
        self.flushed.clear();
        self.masks.forget_steps();
        for (request, client) in &mut self.clients {
            client.num_reported = client.num_received;
            client.num_losses += u32::from(suspects.contains(request));
        }
        let ended = self.scheduler.lose_ranks();
        for request in &ended {
            let client = self.clients.get_mut(request).unwrap();
            assert_eq!((client.ended, client.num_losses), (None, 2), "{client:?}");
            client.ended = Some(FinishReason::Abort);
        }
        let alive = self.clients.values().filter(|it| it.ended.is_none());
        assert!(
            alive.clone().all(|it| it.num_losses < 2),
            "tried a third time"
        );
        let stats = self.scheduler.stats();
        assert_eq!((stats.num_running, stats.num_in_flight), (0, 0));
        assert_eq!(stats.num_waiting as usize, alive.count());
        self.check_pool();
        ended
    }

    /// A request goes on in another scheduler, under the number that is returned.
    pub fn give(&mut self, request: RequestId, other: &mut Self) -> RequestId {
        let moved = self.scheduler.release(request).expect("it waits for pages");
        let client = self.clients.remove(&request).unwrap();
        assert_eq!(
            moved.num_left() as usize + client.emitted.len(),
            client.due as usize
        );
        self.masks.come.remove(&request);
        let seed = self.device.seeds.remove(&request).unwrap_or(request.0);
        other.now = other.now.max(self.now);
        let id = other.scheduler.take_over(moved).expect("it has the pages");
        other.device.seeds.insert(id, seed);
        assert!(
            other.clients.insert(id, client).is_none(),
            "{id:?} is given out twice"
        );
        self.check_pool();
        other.check_pool();
        id
    }

    /// The rows that accept nothing: their masks are late, or they follow a token that was not sampled.
    fn left_out(&mut self, plan: &Plan) -> BTreeSet<RequestId> {
        let oldest = self.in_flight.front().map(|it| it.step);
        let last_chunks = plan.prefill.iter().filter(|row| row.is_last_chunk);
        let sampling = last_chunks
            .map(|row| row.request)
            .chain(plan.decode.iter().map(|row| row.request));
        let masked = sampling.filter(|request| self.clients[request].spec.is_masked);
        masked
            .filter(|request| self.masks.leaves_out(*request, plan.step, oldest))
            .collect()
    }

    /// The mask that a request waits for has come.
    pub fn mask_ready(&mut self, request: RequestId) {
        assert!(self.masks.late.remove(&request), "it has its mask");
        self.masks.come.insert(request);
        assert_eq!(self.advance(Event::MaskReady(request)), []);
    }

    /// Requests whose mask may come.
    pub fn awaiting_masks(&self) -> Vec<RequestId> {
        self.masks.awaited(self.in_flight.front().map(|it| it.step))
    }

    /// One of the late masks comes, any by turns; false if none can.
    pub fn any_mask_ready(&mut self) -> bool {
        let late = self.awaiting_masks();
        let which = oracle::mix(self.num_plans, 3) % late.len().max(1) as u64;
        let late = late.get(which as usize).copied();
        late.map(|request| self.mask_ready(request)).is_some()
    }

    pub fn abort(&mut self, request: RequestId) -> Vec<Output> {
        self.end(Event::Abort(request), request, FinishReason::Abort)
    }

    pub fn stop(&mut self, request: RequestId) -> Vec<Output> {
        self.end(Event::Stop(request), request, FinishReason::Stop)
    }

    /// Nobody finds any page or snapshot, whoever keeps it.
    pub fn flush(&mut self) {
        assert_eq!(self.advance(Event::FlushCache), []);
        for kind in 0..self.num_kinds() {
            assert_eq!(self.scheduler.page_counts(kind).cached, 0);
            let pages = (0..self.num_pages(kind)).map(|page| (kind, PageId(page)));
            let computed = pages.filter(|page| self.device.is_full(*page));
            self.flushed.extend(computed);
        }
        assert_eq!(self.scheduler.stats().snapshots.findable, 0);
        for step in &self.in_flight {
            // Pages that are published with the result of their step.
            self.flushed.retain(|page| !step.named.contains_key(page));
        }
        let unpublished = self.pages_of_last_tokens();
        self.flushed.retain(|page| !unpublished.contains(page));
    }

    /// Pages with the last known token of a request whose row may have written it for nothing: without its mask, or
    /// before draft tokens that were not accepted. It is computed again, and only then is the page published.
    fn pages_of_last_tokens(&self) -> BTreeSet<Page> {
        let has_drafts = self.settings.runtime.draft_width > 0;
        let mut pages = BTreeSet::new();
        for (slot, request) in &self.slots {
            let client = &self.clients[request];
            if client.ended.is_some() || !(client.spec.is_masked || has_drafts) {
                continue;
            }
            let last = client.spec.prompt.len() + client.emitted.len() - 1;
            for kind in 0..self.num_kinds() {
                let page = self
                    .device
                    .table(kind, *slot)
                    .get(last / self.page_size(kind) as usize);
                pages.extend(page.map(|page| (kind, *page)));
            }
        }
        pages
    }

    /// Runs with up to `depth` steps in flight until all is done.
    pub fn run_to_the_end(&mut self, depth: usize) {
        let due: usize = self
            .clients
            .values()
            .map(|client| client.spec.prompt.len() + client.expected.0.len())
            .sum();
        let mut num_plans_left = 1_000 + 200 * due;
        while !self.scheduler.is_idle() {
            while self.num_in_flight() < depth && self.plan().is_some() {
                num_plans_left = num_plans_left.checked_sub(1).expect("no livelock");
            }
            if self.scheduler.is_idle() {
                break;
            }
            let has_more = self.any_mask_ready();
            if self.num_in_flight() > 0 {
                self.complete();
            } else {
                assert!(has_more, "stuck: {:#?}", self.scheduler);
            }
        }
        self.check_the_end();
    }

    fn end(&mut self, event: Event<'_>, request: RequestId, reason: FinishReason) -> Vec<Output> {
        let has_ended = self.clients[&request].ended.is_some();
        let outputs = self.advance(event);
        let expected = if has_ended {
            vec![]
        } else {
            vec![Output::Finished { request, reason }]
        };
        assert_eq!(outputs, expected);
        outputs
    }

    fn advance(&mut self, event: Event<'_>) -> Vec<Output> {
        let mut outputs = Vec::new();
        self.scheduler.advance(event, &mut outputs).unwrap();
        let is_asked = !matches!(event, Event::Result(_));
        for output in &outputs {
            self.check_output(output, is_asked);
        }
        self.check_pool();
        outputs
    }

    fn check_output(&mut self, output: &Output, is_asked: bool) {
        let (Output::Tokens { request, .. }
        | Output::Finished { request, .. }
        | Output::Failed { request }) = output;
        let client = self.clients.get_mut(request).unwrap();
        assert_eq!(client.ended, None, "{request:?} goes on after its end");
        match output {
            Output::Tokens { first, tokens, .. } => {
                assert!(!tokens.is_empty(), "a row without tokens tells nothing");
                assert_eq!(
                    *first as usize,
                    client.emitted.len(),
                    "lost or repeated tokens of {request:?}"
                );
                client.emitted.extend(tokens);
                assert!(
                    client.expected.0.starts_with(&client.emitted),
                    "other tokens for {request:?}: {client:?}"
                );
            }
            Output::Finished { reason, .. } => {
                client.ended = Some(*reason);
                let end = (client.emitted.clone(), *reason);
                assert!(
                    is_asked || end == client.expected,
                    "another end of {request:?}: {client:?}"
                );
            }
            Output::Failed { .. } => {
                assert!(self.failing.contains(request), "{request:?} did not fail");
                client.ended = Some(FinishReason::Abort);
            }
        }
    }

    /// Invariant 1, and the layout of rows.
    fn check_limits(&self, plan: &Plan) {
        let settings = &self.settings;
        let limits = settings.limits().unwrap();
        assert!(
            (1..=limits.max_batch_tokens).contains(&plan.num_tokens()),
            "{plan:?}"
        );
        assert!(
            plan.prefill.len() + plan.decode.len() <= limits.max_rows as usize,
            "{plan:?}"
        );
        assert!(
            plan.prefill
                .iter()
                .all(|row| (1..=limits.long_prefill_token_threshold).contains(&row.length)),
            "{plan:?}"
        );
        let widths = 1..=1 + settings.runtime.draft_width;
        assert!(
            plan.decode.iter().all(|row| widths.contains(&row.length)),
            "{plan:?}"
        );
        assert!(
            settings.scheduler.mixed || plan.prefill.is_empty() || plan.decode.is_empty(),
            "{plan:?}"
        );
        let prefills: Vec<RequestId> = plan.prefill.iter().map(|row| row.request).collect();
        let decodes: Vec<RequestId> = plan.decode.iter().map(|row| row.request).collect();
        let order = |request: &RequestId| self.order(*request);
        assert!(
            self.settings.scheduler.policy == Policy::Fair
                || (prefills.is_sorted_by_key(order) && decodes.is_sorted_by_key(order)),
            "{plan:?}"
        );
        let distinct: BTreeSet<&RequestId> = prefills.iter().chain(&decodes).collect();
        assert_eq!(
            distinct.len(),
            prefills.len() + decodes.len(),
            "two rows of one request: {plan:?}"
        );
        assert!(
            distinct
                .iter()
                .all(|request| self.clients[request].ended.is_none()),
            "a row after the end"
        );
    }

    /// The order of every policy but fair share, whose counts the harness does not keep.
    fn order(&self, request: RequestId) -> (i128, RequestId) {
        let client = &self.clients[&request];
        let aging = self.settings.limits().unwrap().priority_aging.0;
        let due = match self.settings.scheduler.policy {
            Policy::Fcfs | Policy::CacheAware => i128::from(client.arrived),
            Policy::Priority | Policy::Fair => {
                i128::from(client.arrived) + i128::from(aging) * i128::from(client.spec.priority)
            }
        };
        (due, request)
    }

    /// Invariant 5, if nothing was in flight, so that victims of this plan left in this plan:
    /// the first in order is never one, and every request after a victim has a row.
    fn check_victims(&self, plan: &Plan, num_preempted: u64) {
        if self.settings.scheduler.policy == Policy::Fair {
            return;
        }
        let order = |request: &RequestId| self.order(*request);
        let mut victims: Vec<RequestId> = plan
            .freed_slots
            .iter()
            .map(|slot| self.slots[slot])
            .collect();
        victims.retain(|request| self.clients[request].ended.is_none());
        if !self.in_flight.is_empty() || victims.len() as u64 != num_preempted {
            return;
        }
        let prefills = plan.prefill.iter().map(|row| row.request);
        let rows: BTreeSet<RequestId> = prefills
            .chain(plan.decode.iter().map(|row| row.request))
            .collect();
        let alive = || {
            self.slots
                .values()
                .filter(|request| self.clients[request].ended.is_none())
        };
        for victim in &victims {
            assert!(
                alive().any(|request| order(request) < order(victim))
                    || self.waits_with_priority_over(*victim),
                "the first in order gave way: {plan:?}"
            );
            let mut after = alive()
                .filter(|request| order(request) > order(victim) && !victims.contains(request));
            assert!(
                after.all(|request| rows.contains(request)),
                "{victim:?} gave way, one after it did not: {plan:?}"
            );
        }
    }

    /// Whether a request whose priority is better by the threshold has no slot yet.
    fn waits_with_priority_over(&self, victim: RequestId) -> bool {
        let threshold = self.settings.scheduler.priority_preemption_threshold;
        let priority = self.clients[&victim].spec.priority;
        let mut others = self
            .clients
            .iter()
            .filter(|(_, client)| client.ended.is_none());
        others.any(|(request, client)| {
            let difference = i64::from(priority) - i64::from(client.spec.priority);
            threshold.is_some_and(|it| difference >= i64::from(it))
                && !self.slots.values().any(|running| running == request)
                && self.order(*request) < self.order(victim)
        })
    }

    /// Slots and pages change hands only when no step in flight uses them for another.
    fn check_deltas(&mut self, plan: &Plan) {
        for slot in &plan.freed_slots {
            self.slots.remove(slot).expect("only taken slots are freed");
        }
        for new in &plan.new_slots {
            assert!(
                self.slots.insert(new.slot, new.request).is_none(),
                "{:?} is given out twice",
                new.slot
            );
            assert!(
                plan.prefill
                    .iter()
                    .any(|row| row.slot == new.slot && row.start == new.num_cached),
                "a new slot has a row"
            );
        }
        let rows = plan.prefill.iter().map(|row| (row.slot, row.request));
        for (slot, request) in rows.chain(plan.decode.iter().map(|row| (row.slot, row.request))) {
            assert_eq!(
                self.slots.get(&slot),
                Some(&request),
                "a row in another's slot"
            );
        }
        let hits = self.check_hits(plan);
        let mut taken = self.kept_pages(plan);
        taken.extend(hits.iter().map(|(_, page)| *page));
        for (kind, slot, page) in appended(plan) {
            let page = (kind, page);
            if hits.contains(&(slot, page)) {
                continue;
            }
            self.flushed.remove(&page);
            assert!(taken.insert(page), "{page:?} is in two leases");
            let named_for = self
                .in_flight
                .iter()
                .filter_map(|step| step.named.get(&page));
            let owner = self.slots[&slot];
            assert!(
                named_for.clone().all(|request| *request == owner),
                "{page:?} is still named by a step in flight"
            );
        }
    }

    /// Pages that slots held before this plan and hold after it.
    fn kept_pages(&self, plan: &Plan) -> BTreeSet<Page> {
        let new_slots: BTreeSet<SlotId> = plan.new_slots.iter().map(|new| new.slot).collect();
        let kept = self.slots.keys().filter(|slot| !new_slots.contains(slot));
        let mut pages = BTreeSet::new();
        for slot in kept {
            for kind in 0..self.num_kinds() {
                let trimmed = plan.trimmed_slots.iter();
                let trimmed = trimmed.filter(|it| (it.slot, it.kind as usize) == (*slot, kind));
                let table = self.device.table(kind, *slot);
                let num_kept = trimmed.map(|it| it.num_pages as usize).min();
                let kept = &table[..num_kept.unwrap_or(table.len())];
                pages.extend(kept.iter().map(|page| (kind, *page)));
            }
        }
        pages
    }

    fn num_snapshots(&self) -> u32 {
        self.settings.runtime.num_snapshots.unwrap_or(0)
    }

    fn num_kinds(&self) -> usize {
        1 + self.settings.runtime.other_kinds.len()
    }

    fn page_size(&self, kind: usize) -> u32 {
        match kind {
            0 => self.settings.pages.page_size,
            _ => self.settings.runtime.other_kinds[kind - 1].page_size,
        }
    }

    fn num_pages(&self, kind: usize) -> u32 {
        match kind {
            0 => self.settings.runtime.num_pages,
            _ => self.settings.runtime.other_kinds[kind - 1].num_pages,
        }
    }

    /// Pages that come from the cache. Steps that were sent before have computed every KV in them.
    fn check_hits(&self, plan: &Plan) -> Vec<(SlotId, Page)> {
        for new in &plan.new_slots {
            let client = &self.clients[&new.request];
            let num_known = client.spec.prompt.len() + client.emitted.len();
            assert!((new.num_cached as usize) < num_known, "{new:?}");
            let is_whole = |kind| new.num_cached.is_multiple_of(self.page_size(kind));
            assert!((0..self.num_kinds()).all(is_whole), "{new:?}");
        }
        let hits = self.device.hits(plan);
        assert!(
            hits.iter().all(|(_, page)| self.device.is_full(*page)),
            "a page was published before its step was sent: {plan:?}"
        );
        assert!(
            hits.iter().all(|(_, page)| !self.flushed.contains(page)),
            "a page was found behind a flush: {plan:?}"
        );
        hits
    }

    /// Each prompt position is reported once, in order, and the lookahead token is the prompt's.
    fn check_prompt_positions(&mut self, plan: &Plan) {
        let mut first = 0;
        for row in &plan.prefill {
            let client = self.clients.get_mut(&row.request).unwrap();
            check_prompt_row(row, &plan.token_ids[first..], client);
            first += (row.length + u32::from(row.lookahead)) as usize;
        }
    }

    /// Invariant 2.
    fn check_pool(&self) {
        for kind in 0..self.num_kinds() {
            let pages = self.scheduler.page_counts(kind);
            let sum = pages.free + pages.leased + pages.cached + pages.parked;
            assert_eq!(sum, self.num_pages(kind), "{pages:?}");
        }
        check_counts(&self.scheduler.stats(), self.num_snapshots());
    }

    /// Invariant 3, and everything is given back.
    pub fn check_the_end(&self) {
        for (request, client) in &self.clients {
            assert!(client.ended.is_some(), "{request:?} never ended");
        }
        let stats = self.scheduler.stats();
        assert_eq!((stats.num_running, stats.num_waiting), (0, 0));
        let snapshots = stats.snapshots;
        assert_eq!(snapshots.free + snapshots.findable, self.num_snapshots());
        for kind in 0..self.num_kinds() {
            let pages = self.scheduler.page_counts(kind);
            assert_eq!(pages.free + pages.cached, self.num_pages(kind));
            assert!(
                self.settings.pages.prefix_cache || pages.cached == 0,
                "a prompt's choices are gone, their pages are not: {pages:?}"
            );
        }
    }
}

fn check_prompt_row(row: &PrefillRow, tokens: &[TokenId], client: &mut Client) {
    let reported = &row.prompt_logprobs;
    if client.spec.pooled.is_some() {
        let num_prompt = u32::try_from(client.spec.prompt.len()).unwrap();
        let end = row.start + row.length;
        assert_eq!(
            (reported, row.lookahead),
            (&(row.start..end), end < num_prompt)
        );
        return;
    }
    if !client.spec.prompt_logprobs {
        assert!(reported.is_empty() && !row.lookahead);
        return;
    }
    let num_prompt = u32::try_from(client.spec.prompt.len()).unwrap();
    let end = row.start + row.length;
    assert_eq!(row.lookahead, end < num_prompt, "{row:?}");
    if row.lookahead {
        assert_eq!(
            tokens[row.length as usize],
            client.spec.prompt[end as usize]
        );
    }
    if !reported.is_empty() {
        assert_eq!(
            reported.start, client.num_reported,
            "a gap or a repetition: {row:?}"
        );
        assert!(
            reported.start > row.start && reported.end <= (end + 1).min(num_prompt),
            "{row:?}"
        );
        client.num_reported = reported.end;
    }
    let is_whole = row.is_last_chunk;
    assert!(
        !is_whole || client.num_reported >= num_prompt,
        "positions were left out: {row:?}"
    );
}
