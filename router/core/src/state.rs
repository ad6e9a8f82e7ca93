//! The states of a request, and the transitions between them.
//!
//! [`Queued`] (waiting or preempted) holds no page. [`Running`] owns a lease and a slot. A transition
//! consumes the old state, so a request is in one state at a time.

use std::borrow::Cow;
use std::num::NonZeroU32;
use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::event::{FinishReason, Output};
use crate::fair_share::VirtualTime;
use crate::ids::{Micros, RequestId, SlotId, StepId, TenantId, TokenId};
use crate::kv_cache::{Lease, PerKind};
use crate::kv_event::StoredPage;
use crate::plan::NewSlot;
use crate::prefix_hasher::{PageHash, PrefixHasher};
use crate::request::{PooledTokens, Request};
use crate::settings::Policy;
use crate::slot_saves::SlotSaves;

/// The order of requests: the policy's key, then priority with ageing, then the earlier arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Order {
    /// Fair share: the tenant's virtual time at first admission; until then the maximum.
    virtual_time: VirtualTime,
    /// The arrival in microseconds, later by the ageing time for each step of priority: a request waits
    /// for others of a better priority only if they came within that time.
    due: DueMicros,
    request: RequestId,
}

/// A time on the caller's clock, which may lie before its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DueMicros(u64);

impl DueMicros {
    /// `arrival`, later by `aging` for each step of `priority`.
    pub(crate) fn new(arrival: Micros, priority: i32, aging: Micros) -> Self {
        const START: i128 = 1 << 63;
        let after_start = i128::from(arrival.0) + i128::from(aging.0) * i128::from(priority);
        let due = (START + after_start).clamp(0, u64::MAX.into());
        Self(u64::try_from(due).expect("it was clamped"))
    }
}

impl Order {
    pub(crate) fn new(request: RequestId, policy: Policy, due: DueMicros) -> Self {
        Self {
            virtual_time: VirtualTime(u64::from(policy == Policy::Fair) * u64::MAX),
            due,
            request,
        }
    }

    pub(crate) fn request(&self) -> RequestId {
        self.request
    }
}

/// Who may find the pages that a request fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// The prefix cache is off.
    Nobody,
    /// The prefix cache is off: the other choices of the prompt, and only the prompt's pages.
    Choices,
    /// Every request with the same salt.
    Everyone,
}

impl Sharing {
    pub(crate) fn of(request: &Request, prefix_cache: bool, keeps_slot_state: bool) -> Self {
        match (prefix_cache, request.num_choices.get()) {
            (true, _) => Self::Everyone,
            (false, 1) => Self::Nobody,
            // Without snapshots pages alone are of no use to another choice.
            (false, _) if keeps_slot_state => Self::Nobody,
            (false, _) => Self::Choices,
        }
    }
}

/// What a request keeps in every state.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) order: Order,
    first_choice: RequestId,
    sharing: Sharing,
    request: Request,
    /// Output tokens after which the request ends.
    max_output_tokens: u32,
    output: Vec<TokenId>,
    /// The worker was asked for the log-probabilities of prompt positions below this one.
    num_prompt_reported: u32,
    /// Of those, positions below this one have come.
    num_prompt_received: u32,
    /// Hashes of its full pages of each kind, as far as they were needed. Known tokens never change.
    page_hashes: PerKind<Vec<PageHash>>,
    /// Leading tokens that were found in the cache while it waited for the next ones.
    pub(crate) num_found: u32,
    /// Requests that were admitted before it while it was the head, for lack of its pages.
    pub(crate) num_overtaken: u32,
    /// The mask has come that a row lacked.
    pub(crate) has_late_mask: bool,
    /// Losses of all ranks while it had a row in flight, since it last sampled.
    pub(crate) num_losses: u32,
}

impl Job {
    pub(crate) fn new(
        order: Order,
        request: Request,
        max_output_tokens: u32,
        sharing: Sharing,
    ) -> Self {
        Self {
            order,
            first_choice: order.request,
            sharing,
            request,
            max_output_tokens,
            output: Vec::new(),
            num_prompt_reported: 0,
            num_prompt_received: 0,
            page_hashes: PerKind::new(),
            num_found: 0,
            num_overtaken: 0,
            has_late_mask: false,
            num_losses: 0,
        }
    }

    /// Another choice of the same prompt. Neither has run.
    pub(crate) fn choice(&self, id: RequestId) -> Self {
        let mut choice = self.clone();
        choice.order.request = id;
        choice.request.prompt_logprobs = false;
        choice
    }

    /// The same request in another replica's scheduler, apart from other choices of its prompt.
    pub(crate) fn renumber(&mut self, id: RequestId, prefix_cache: bool, keeps_slot_state: bool) {
        (self.order.request, self.first_choice) = (id, id);
        self.request.num_choices = NonZeroU32::MIN;
        self.sharing = Sharing::of(&self.request, prefix_cache, keeps_slot_state);
        self.page_hashes = PerKind::new();
        self.num_overtaken = 0;
        self.has_late_mask = false;
        self.forget_cached();
    }

    /// Fair share: where it comes among the requests of its tenant.
    pub(crate) fn set_virtual_time(&mut self, time: VirtualTime) {
        self.order.virtual_time = time;
    }

    pub(crate) fn id(&self) -> RequestId {
        self.order.request
    }

    pub(crate) fn prompt(&self) -> &Arc<[TokenId]> {
        &self.request.prompt
    }

    /// Whether its prompt has one answer.
    pub(crate) fn is_only_choice(&self) -> bool {
        self.request.num_choices == NonZeroU32::MIN
    }

    /// The salt that was asked for.
    pub(crate) fn asked_salt(&self) -> u64 {
        self.request.salt
    }

    /// The first choice of its prompt, which may be itself.
    pub(crate) fn first_choice(&self) -> RequestId {
        self.first_choice
    }

    pub(crate) fn is_first_choice(&self) -> bool {
        self.first_choice == self.order.request
    }

    /// All choices of its prompt.
    pub(crate) fn choices(&self) -> Range<RequestId> {
        let first = self.first_choice;
        first..RequestId(first.0 + u64::from(self.request.num_choices.get()))
    }

    pub(crate) fn sharing(&self) -> Sharing {
        self.sharing
    }

    pub(crate) fn shares_pages(&self) -> bool {
        self.sharing != Sharing::Nobody
    }

    /// Leading tokens of prompt and output whose full pages others may find.
    pub(crate) fn num_shareable_tokens(&self) -> u32 {
        match self.sharing {
            Sharing::Nobody => 0,
            Sharing::Choices => self.prompt_len(),
            Sharing::Everyone => u32::MAX,
        }
    }

    /// Pages of different salts have different hashes.
    fn salt(&self) -> u64 {
        match self.sharing {
            Sharing::Choices => self.first_choice.0,
            Sharing::Nobody | Sharing::Everyone => self.request.salt,
        }
    }

    pub(crate) fn tenant(&self) -> TenantId {
        self.request.tenant
    }

    pub(crate) fn priority(&self) -> i32 {
        self.request.priority
    }

    pub(crate) fn weight(&self) -> NonZeroU32 {
        self.request.weight
    }

    pub(crate) fn prompt_len(&self) -> u32 {
        len_u32(&self.request.prompt)
    }

    /// Whether its prefill samples its last token or none, so that it never decodes.
    pub(crate) fn ends_with_prefill(&self) -> bool {
        self.max_output_tokens - self.num_output() <= 1
    }

    /// Whether a token is due after a chunk that ends at position `end`.
    pub(crate) fn samples_at(&self, end: u32) -> bool {
        self.max_output_tokens > 0 && end == self.num_known()
    }

    /// Whether each of its tokens needs a mask.
    pub(crate) fn is_masked(&self) -> bool {
        self.request.is_masked
    }

    /// Words that travel with it when it enters a slot.
    pub(crate) fn num_slot_words(&self) -> u32 {
        match self.request.num_slot_words {
            0 => 0,
            num => num.saturating_add(self.num_output()),
        }
    }

    pub(crate) fn output(&self) -> &[TokenId] {
        &self.output
    }

    /// Output tokens after which the request ends.
    pub(crate) fn max_output(&self) -> u32 {
        self.max_output_tokens
    }

    /// Tokens that it may come to, with its prompt's.
    pub(crate) fn most_tokens(&self) -> u64 {
        u64::from(self.prompt_len()) + u64::from(self.max_output())
    }

    pub(crate) fn num_output(&self) -> u32 {
        len_u32(&self.output)
    }

    /// Tokens whose KV must be leased before the next output token can be sampled.
    pub(crate) fn num_known(&self) -> u32 {
        self.prompt_len() + self.num_output()
    }

    /// The tokens at positions `start..end` of prompt + output.
    pub(crate) fn extend_with_tokens(&self, tokens: &mut Vec<TokenId>, start: u32, end: u32) {
        let (start, end, prompt) = (start as usize, end as usize, &self.request.prompt);
        tokens.extend_from_slice(&prompt[start.min(prompt.len())..end.min(prompt.len())]);
        let past_prompt = |position: usize| position.saturating_sub(prompt.len());
        tokens.extend_from_slice(&self.output[past_prompt(start)..past_prompt(end)]);
    }

    /// Hashes of the first `num_pages` pages of a kind. Their tokens are known, and each is hashed once.
    pub(crate) fn page_hashes(
        &mut self,
        kind: usize,
        num_pages: u32,
        page_size: u32,
        hasher: &mut PrefixHasher,
    ) -> &[PageHash] {
        if self.page_hashes.len() <= kind {
            self.page_hashes.resize(kind + 1, Vec::new());
        }
        let num_known = len_u32(&self.page_hashes[kind]);
        self.page_hashes[kind].reserve(num_pages.saturating_sub(num_known) as usize);
        for page in num_known..num_pages {
            let parent = self.page_hashes[kind].last().copied();
            let parent = parent.unwrap_or_else(|| hasher.root(self.salt()));
            let hash = hasher.child(
                parent,
                &self.tokens_of(page * page_size, (page + 1) * page_size),
            );
            self.page_hashes[kind].push(hash);
        }
        self.known_hashes(kind, num_pages)
    }

    /// The tokens at positions `start..end` of prompt + output. Those of the prompt are not copied.
    fn tokens_of(&self, start: u32, end: u32) -> Cow<'_, [TokenId]> {
        let of_prompt = self.request.prompt.get(start as usize..end as usize);
        of_prompt.map_or_else(
            || {
                let mut tokens = Vec::new();
                self.extend_with_tokens(&mut tokens, start, end);
                Cow::Owned(tokens)
            },
            Cow::Borrowed,
        )
    }

    /// The same, if they were hashed before.
    pub(crate) fn known_hashes(&self, kind: usize, num_pages: u32) -> &[PageHash] {
        let hashes = self.page_hashes.get(kind);
        &hashes.map_or(&[][..], Vec::as_slice)[..num_pages as usize]
    }

    /// The hashes of one kind that are known so far.
    pub(crate) fn all_known_hashes(&self, kind: usize) -> &[PageHash] {
        self.page_hashes.get(kind).map_or(&[], Vec::as_slice)
    }

    /// A page that was hashed before, as listeners see it.
    pub(crate) fn stored_page(&self, kind: usize, page: u32, page_size: u32) -> StoredPage {
        let hashes = self.known_hashes(kind, page + 1);
        let mut tokens = Vec::new();
        self.extend_with_tokens(&mut tokens, page * page_size, (page + 1) * page_size);
        StoredPage {
            kind: u32::try_from(kind).expect("a model has few cache kinds"),
            hash: hashes[page as usize],
            parent: page.checked_sub(1).map(|before| hashes[before as usize]),
            salt: self.salt(),
            tokens: tokens.into(),
        }
    }

    /// Leading tokens that may be taken from the cache. The last token is always computed, because the
    /// next one is sampled from it. So is every token that predicts a prompt token whose
    /// log-probability is still to be reported.
    pub(crate) fn num_cacheable_tokens(&self) -> u32 {
        if self.request.pooled == Some(PooledTokens::All) {
            return 0;
        }
        let is_measured = self.request.prompt_logprobs;
        if is_measured && self.num_prompt_reported < self.prompt_len() {
            self.num_prompt_reported.saturating_sub(1)
        } else {
            (self.num_known() - 1).min(self.num_shareable_tokens())
        }
    }

    /// Prompt positions that a chunk `start..end` predicts and no earlier chunk did.
    ///
    /// Of a pooled prompt all that the chunk computes.
    /// A chunk predicts the token after each of its own. A preempted request computes its prompt
    /// again, but reports no position twice.
    pub(crate) fn claim_prompt_positions(&mut self, start: u32, end: u32) -> Range<u32> {
        if self.request.pooled.is_some() {
            return start..end;
        }
        if !self.request.prompt_logprobs {
            return 0..0;
        }
        let first = (start + 1).max(self.num_prompt_reported);
        let past = (end + 1).min(self.prompt_len());
        self.num_prompt_reported = self.num_prompt_reported.max(past);
        first..past.max(first)
    }

    /// The result of a chunk that ends at `end` has come, with the prompt positions that it predicts.
    fn receive_prompt_positions(&mut self, end: u32) {
        self.num_prompt_received = self
            .num_prompt_reported
            .min((end + 1).max(self.num_prompt_received));
    }

    /// The prefix cache is empty.
    pub(crate) fn forget_cached(&mut self) {
        self.num_found = 0;
    }

    /// Whether the chunk's last position predicts a prompt token that the chunk does not hold.
    pub(crate) fn wants_lookahead(&self, chunk_end: u32) -> bool {
        let is_told = self.request.prompt_logprobs || self.request.pooled.is_some();
        is_told && chunk_end < self.prompt_len()
    }

    /// Appends a sampled token to the output. Returns why it ends the request, if it does.
    fn push(&mut self, token: TokenId) -> Option<FinishReason> {
        self.output.push(token);
        if self.request.stop_ids.contains(&token) {
            Some(FinishReason::Stop)
        } else {
            (self.num_output() == self.max_output_tokens).then_some(FinishReason::Length)
        }
    }
}

/// A request that holds nothing on the device.
#[derive(Clone, Debug)]
pub(crate) enum Queued {
    /// Never admitted so far.
    Waiting {
        /// The request.
        job: Box<Job>,
        /// When it was submitted.
        since: Micros,
    },
    /// Gave its pages to an earlier request. It keeps its output, and computes prompt and output again.
    Preempted {
        /// The request.
        job: Box<Job>,
    },
}

impl Queued {
    pub(crate) fn job(&self) -> &Job {
        match self {
            Self::Waiting { job, .. } | Self::Preempted { job } => job,
        }
    }

    pub(crate) fn job_mut(&mut self) -> &mut Job {
        match self {
            Self::Waiting { job, .. } | Self::Preempted { job } => job,
        }
    }

    /// How long it has waited to run for the first time.
    pub(crate) fn waited(&self, now: Micros) -> Micros {
        match self {
            Self::Waiting { since, .. } => Micros(now.0.saturating_sub(since.0)),
            Self::Preempted { .. } => Micros(0),
        }
    }

    /// Fair share: a request keeps the position of its first admission.
    pub(crate) fn set_virtual_time(&mut self, time: VirtualTime) {
        if let Self::Waiting { job, .. } = self {
            job.set_virtual_time(time);
        }
    }

    /// Gives the request a slot and a lease.
    pub(crate) fn admit(
        self,
        admission: Admission,
        step: StepId,
        now: Micros,
    ) -> (Running, NewSlot) {
        let (job, waited) = match self {
            Self::Waiting { job, since } => (job, Some(Micros(now.0.saturating_sub(since.0)))),
            Self::Preempted { job } => (job, None),
        };
        let new_slot = NewSlot {
            slot: admission.slot,
            request: job.id(),
            next_output: job.num_output(),
            num_cached: admission.num_cached,
            waited,
        };
        (Running::new(job, admission, step), new_slot)
    }
}

/// What a request gets at admission.
#[derive(Debug)]
pub(crate) struct Admission {
    pub(crate) slot: SlotId,
    /// The pages that were found in the cache.
    pub(crate) lease: Lease,
    /// Tokens in them.
    pub(crate) num_cached: u32,
    /// If the model keeps slot state, what is saved of it.
    pub(crate) saves: Option<Box<SlotSaves>>,
    /// Tokens that it is expected to hold at its end.
    pub(crate) num_expected: u64,
}

/// The phase of a request that holds a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Tokens of its prompt, or of its output before a preemption, are not planned yet.
    Prefilling,
    /// It is in the decode queue.
    Decoding,
    /// All tokens that are due are in flight, or the whole prompt if none is. It needs no more rows.
    FullyPlanned,
    /// It gets no more rows, and is preempted when its results are in.
    Held,
    /// A row's mask was late. It gets its next row when the mask is there and its results are in.
    AwaitingMask,
}

/// A request that owns a lease and a slot.
#[derive(Clone, Debug)]
pub(crate) struct Running {
    pub(crate) job: Box<Job>,
    pub(crate) slot: SlotId,
    pub(crate) lease: Lease,
    /// If the model keeps slot state that others may find.
    pub(crate) saves: Option<Box<SlotSaves>>,
    /// The next boundary that is saved. Kept here, where each row finds it.
    pub(crate) next_save: u32,
    pub(crate) num_saves_in_flight: u32,
    pub(crate) phase: Phase,
    /// Positions that are computed or in flight, as if all drafts were accepted: where the next row
    /// starts.
    pub(crate) num_planned: u32,
    /// Positions whose KV is computed and whose tokens are final.
    pub(crate) num_computed: u32,
    /// Leading tokens whose pages came from the cache, so that others may hold them too.
    pub(crate) num_shared: u32,
    /// Tokens that it was expected to hold at its end.
    pub(crate) num_expected: u64,
    /// The last step in which it had a row.
    pub(crate) last_step: StepId,
    /// A token was sampled in this slot, which the device keeps as the input of a decode row.
    has_sampled: bool,
    num_rows_in_flight: u32,
    /// Output tokens that rows in flight can give at most.
    num_tokens_in_flight: u32,
}

impl Running {
    fn new(job: Box<Job>, admission: Admission, step: StepId) -> Self {
        Self {
            job,
            slot: admission.slot,
            lease: admission.lease,
            next_save: admission.saves.as_ref().map_or(u32::MAX, |it| it.first()),
            saves: admission.saves,
            num_saves_in_flight: 0,
            phase: Phase::Prefilling,
            num_planned: admission.num_cached,
            num_computed: admission.num_cached,
            num_shared: admission.num_cached,
            num_expected: admission.num_expected,
            last_step: step,
            has_sampled: false,
            num_rows_in_flight: 0,
            num_tokens_in_flight: 0,
        }
    }

    /// Tokens of prompt and earlier output that are not planned yet.
    pub(crate) fn num_to_prefill(&self) -> u32 {
        self.job.num_known() - self.num_planned
    }

    pub(crate) fn is_in_flight(&self) -> bool {
        self.num_rows_in_flight > 0
    }

    /// Output tokens that are due and not in flight.
    pub(crate) fn num_left(&self) -> u32 {
        self.job.max_output_tokens - self.job.num_output() - self.num_tokens_in_flight
    }

    /// Schedules a row of `length` tokens that samples `num_sampled` at most. Returns the next phase.
    pub(crate) fn schedule_row(&mut self, step: StepId, length: u32, num_sampled: u32) -> Phase {
        self.num_planned += length;
        self.last_step = step;
        self.num_rows_in_flight += 1;
        self.num_tokens_in_flight += num_sampled;
        match (num_sampled, self.num_left()) {
            (0, _) if self.num_to_prefill() > 0 => Phase::Prefilling,
            (_, 0) => Phase::FullyPlanned,
            _ => Phase::Decoding,
        }
    }

    /// A chunk that ends before position `end` and samples nothing is complete. Returns whether the request ends
    /// with it.
    pub(crate) fn complete_chunk(&mut self, end: u32) -> bool {
        self.num_rows_in_flight -= 1;
        self.num_computed = end;
        self.job.receive_prompt_positions(end);
        self.job.max_output_tokens == 0 && end == self.job.num_known()
    }

    /// A row that could accept `num_sampled` tokens is complete and accepted none. Its last token is computed again.
    pub(crate) fn leave_out(&mut self, num_sampled: u32) {
        self.num_rows_in_flight -= 1;
        self.num_tokens_in_flight -= num_sampled;
        self.num_planned -= num_sampled;
        self.job.receive_prompt_positions(self.job.num_known());
        self.num_computed = self.job.num_known() - 1;
    }

    /// Whether the mask is there that it waits for, and nothing of it is in flight. The mask then is no longer late.
    pub(crate) fn takes_late_mask(&mut self) -> bool {
        let is_awaited = self.phase == Phase::AwaitingMask && !self.is_in_flight();
        is_awaited && std::mem::take(&mut self.job.has_late_mask)
    }

    /// How a request goes on whose row accepted nothing.
    pub(crate) fn phase_with_mask(&self) -> Phase {
        if self.has_sampled {
            Phase::Decoding
        } else {
            Phase::Prefilling
        }
    }

    /// A row that could accept `num_sampled` tokens is complete. Returns the output up to what ends the
    /// request, and the reason if it ends.
    #[inline]
    pub(crate) fn complete_sample(
        &mut self,
        accepted: &[TokenId],
        num_sampled: u32,
        sampled_row: u32,
    ) -> (Output, Option<FinishReason>) {
        self.num_rows_in_flight -= 1;
        self.num_tokens_in_flight -= num_sampled;
        self.num_planned -= num_sampled - len_u32(accepted);
        self.has_sampled = true;
        self.job.has_late_mask = false;
        self.job.receive_prompt_positions(self.job.num_known());
        let first = self.job.num_output();
        let mut tokens = SmallVec::new();
        let end = accepted.iter().find_map(|token| {
            tokens.push(*token);
            self.job.push(*token)
        });
        // The last token has no KV yet.
        self.num_computed = self.job.num_known() - 1;
        (
            Output::Tokens {
                request: self.job.id(),
                first,
                tokens,
                sampled_row,
            },
            end,
        )
    }

    /// Back to the queue after its ranks were lost, with the lease and the slot.
    pub(crate) fn lose(self) -> Queued {
        let mut job = self.job;
        job.forget_cached();
        job.num_prompt_reported = job.num_prompt_received;
        job.has_late_mask = false;
        Queued::Preempted { job }
    }

    /// Back to the queue. The caller releases lease and slot.
    pub(crate) fn preempt(self) -> (Queued, Lease, SlotId) {
        assert!(
            !self.is_in_flight(),
            "{:?} in {:?} cannot be preempted: its rows are in flight",
            self.job.id(),
            self.phase
        );
        (Queued::Preempted { job: self.job }, self.lease, self.slot)
    }
}

fn len_u32<T>(items: &[T]) -> u32 {
    u32::try_from(items.len()).expect("submit keeps prompt and output within max_model_len")
}
