//! The engine as Python sees it. Every call but [`Engine::close`] returns at once.

use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use plait_core::Micros;
use plait_openai::{ApiError, Grammars, LogprobsBudget};
use plait_proto::Fingerprint;
use plait_text::{ModelFilesError, ModelText};

use crate::clock::{Clock, SystemClock};
use crate::compile_pool::{CompileWorker, num_compile_threads};
use crate::compile_queue::CompileQueue;
use crate::driver::{Driver, Grouped, ReplicaConfig};
use crate::group::{GroupProblem, GroupSettings, Seat};
use crate::intake::Intake;
use crate::kv_events::{KvEventQueue, KvEventSender, KvEventsProblem, Origin, Publisher};
use crate::link::{Link, LinkError};
use crate::listing::{ANSWER_TIMEOUT, ListedReplicas};
use crate::logging;
use crate::mailbox::Mail;
use crate::masks::{MaskJobs, mask_threads};
use crate::metrics::Rejection;
use crate::output::{EndedResponse, Output, write_bodies};
use crate::output_queue::StreamId;
use crate::rank_range::RankRange;
use crate::replica_pools::ReplicaPools;
use crate::request_seeds::SeedSource;
use crate::routes::Routes;
use crate::settings::{EngineSettings, HashKey, SettingsProblem};
use crate::shared::{NextRanks, ReplicaShared, Sentinel, Shared};
use crate::step_trace::{StepFile, StepRecorder};
use crate::stream_writer::StreamWriter;
use crate::text_pool::TextWorker;
use crate::text_queue::{Job, JobKind, Put, TextQueue};
use crate::timeouts::Timeouts;

/// Prepared requests on their way to the driver, which takes all in each pass.
const MAX_ADMISSIONS: usize = 64;
/// Batches of events on their way to the output thread. A full channel keeps the driver from planning.
const MAX_BATCHES: usize = 64;
/// Ended answers with log-probabilities whose bodies wait to be written. A full channel blocks the output
/// thread.
const MAX_BODIES: usize = 1024;
/// Pages of the pool before the ranks report theirs, if the user gave no number: more than any pool has.
const MOST_PAGES: u32 = 1 << 31;

/// Why an engine cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The settings cannot work.
    #[error(transparent)]
    Settings(#[from] SettingsProblem),
    /// The model's files cannot be served.
    #[error(transparent)]
    Model(#[from] ModelFilesError),
    /// The step trace cannot be written.
    #[error("--step-trace {path}: {source}; name a new file in a folder that may be written")]
    StepTrace {
        /// As given.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The workers' socket cannot be opened.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// KV events cannot be published.
    #[error(transparent)]
    KvEvents(#[from] KvEventsProblem),
    /// This engine cannot be part of its group.
    #[error(transparent)]
    Group(#[from] GroupProblem),
    /// The system lacks threads or file descriptors.
    #[error("the system refused a thread or a file descriptor: {0}")]
    System(#[from] io::Error),
}

/// Replicas behind one front door. Each has a scheduler, a link and an output thread; text is prepared for all.
pub struct Engine {
    shared: Arc<Shared>,
    model: Arc<ModelText>,
    max_model_len: u32,
    endpoints: Vec<String>,
    settings: EngineSettings,
    /// For ranks on other hosts.
    remote_endpoints: Vec<Option<String>>,
    text: TextSide,
    writer: StreamWriter,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Engine {
    /// Reads the model's text side, binds the link and starts the threads; `settings` is JSON.
    pub fn start(settings: &[u8]) -> Result<Self, StartError> {
        Self::start_with(
            settings,
            Timeouts::default(),
            Arc::new(SystemClock::start()),
        )
    }

    /// The same, with other limits on waiting, measured by `clock`.
    pub fn start_with(
        settings: &[u8],
        timeouts: Timeouts,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, StartError> {
        let mut settings = EngineSettings::parse(settings)?;
        settings.hash_key.get_or_insert_with(HashKey::draw);
        logging::start(settings.log_level, settings.log_json);
        let (load, capture) = settings.start_timeouts();
        let timeouts = timeouts.with_start(load, capture);
        let model = ModelText::load(&settings.model, settings.served_model_name.as_deref())?;
        let model = settings.generation.apply(model)?;
        let model = Arc::new(settings.template.apply(model)?);
        let max_model_len = settings.model_len(model.context_length())?;
        let num_pages = settings.pages.num_pages.unwrap_or(MOST_PAGES);
        let trial = settings.for_replica(max_model_len, &ReplicaPools::of_pages(num_pages));
        let limits = trial.limits().map_err(SettingsProblem::from)?;
        let links = bind_links(&settings)?;
        let facts = settings.group_facts(max_model_len, model.vocab_size());
        let records = settings.step_trace.as_deref().map(create_step_trace);
        let records = records.transpose()?;
        let shared = Shared::new(clock, settings.num_replicas, routes(&settings))?;
        let group = settings.group.as_ref().map(|place| {
            let num_replicas = settings.num_replicas;
            place.group(num_replicas, limits.max_batch_tokens, facts, timeouts.group)
        });
        let group = join(group.transpose()?, &shared)?;
        let kv_events = publish_kv_events(&settings, &shared)?;
        let replica = ReplicaConfig {
            settings,
            max_model_len,
            vocab_size: model.vocab_size(),
            timeouts,
            started: shared.clock.now(),
        };
        Ok(Self::spawn(
            shared, links, group, model, &replica, records, kv_events,
        )?)
    }

    fn spawn(
        shared: Shared,
        links: Vec<Link>,
        group: Vec<Grouped>,
        model: Arc<ModelText>,
        replica: &ReplicaConfig,
        records: Option<(StepRecorder, StepFile)>,
        kv_events: Vec<(KvEventSender, Publisher)>,
    ) -> io::Result<Self> {
        let (recorder, step_file) = records.unzip();
        let (kv_events, publishers): (Vec<_>, Vec<_>) = kv_events.into_iter().unzip();
        let mut kv_events = kv_events.into_iter();
        let mut group = group.into_iter();
        let shared = Arc::new(shared);
        let (endpoints, remote_endpoints) = links.iter().map(Link::endpoints).unzip();
        let writer = StreamWriter::spawn(&shared)?;
        let mut threads = Threads::new(shared.clone());
        let (bodies, ended) = crossbeam_channel::bounded(MAX_BODIES);
        let masks = threads.spawn_masks(replica.vocab_size)?;
        let mut admissions = Vec::new();
        for (own, link) in shared.replicas().iter().zip(links) {
            let (admission, admitted) = crossbeam_channel::bounded(MAX_ADMISSIONS);
            admissions.push(admission);
            let (batches, written) = crossbeam_channel::bounded(MAX_BATCHES);
            let output = Output::new(shared.clone(), own.clone(), bodies.clone());
            let driver = Driver {
                link,
                admissions: admitted,
                batches,
                shared: shared.clone(),
                own: own.clone(),
                recorder: recorder.clone(),
                kv_events: kv_events.next(),
                group: group.next(),
                masks: masks.clone(),
                replica: replica.clone(),
            };
            threads.spawn_for(own, "plait-driver", move || driver.run())?;
            threads.spawn_for(own, "plait-output", move || output.run(&written))?;
        }
        drop((bodies, recorder, masks));
        threads.spawn_writers(ended, step_file, publishers)?;
        let intake = Arc::new(Intake {
            vocab_size: replica.vocab_size,
            shared: shared.clone(),
            admissions,
        });
        let text = TextSide::spawn(&mut threads, &intake, &model, replica)?;
        Ok(Self {
            shared,
            model,
            max_model_len: replica.max_model_len,
            endpoints,
            settings: replica.settings.clone(),
            remote_endpoints,
            text,
            writer,
            threads: Mutex::new(threads.handles),
        })
    }

    /// Where the workers of each replica dial.
    pub fn endpoints(&self) -> &[String] {
        &self.endpoints
    }

    /// Where those on other hosts dial, for each replica that has any.
    pub fn remote_endpoints(&self) -> &[Option<String>] {
        &self.remote_endpoints
    }

    /// Readable when [`Engine::take`] has something or the phase has changed.
    pub fn event_fd(&self) -> RawFd {
        self.shared.python_queue.wakeup().fd()
    }

    /// What a worker's Hello must carry; the first call counts.
    pub fn set_config_fingerprint(&self, fingerprint: Fingerprint) {
        let _first = self.shared.config_fingerprint.set(fingerprint);
    }

    /// Queues a request, given as JSON; a refusal comes as the stream's error record. Tenants take turns.
    pub fn submit(&self, stream: StreamId, tenant: u64, request: &[u8]) {
        self.put(stream, tenant, JobKind::Generate, request);
    }

    /// Queues a call that generates nothing, given as JSON, in turns with the requests.
    pub fn submit_text(&self, stream: StreamId, tenant: u64, call: &[u8]) {
        self.put(stream, tenant, JobKind::Text, call);
    }

    fn put(&self, stream: StreamId, tenant: u64, kind: JobKind, request: &[u8]) {
        if !self.shared.status.is_ready() || !self.shared.pending_streams.enter(stream) {
            let not_ready = self.shared.status.refusal();
            return self.reject(stream, Rejection::NotReady, &not_ready);
        }
        let put = self.text.queue.put(Job {
            stream,
            tenant,
            kind,
            json: request.to_vec(),
            received: self.shared.clock.now(),
        });
        for job in &put.rejected {
            if self.shared.leave_pending(job.stream) {
                self.reject(job.stream, Rejection::QueueFull, &queue_full(&put));
            }
        }
    }

    fn reject(&self, stream: StreamId, rejection: Rejection, error: &ApiError) {
        self.shared.metrics.rejections.count(rejection);
        self.shared.output_queue.put_error(stream, error);
    }

    /// Makes the driver read the clock again. A clock that jumps needs this after each jump.
    pub fn wake(&self) {
        self.shared.wake_all();
    }

    /// The client is gone; unknown or ended streams are fine. Records made before may still come.
    pub fn abort(&self, stream: StreamId) {
        if self.text.forget(stream) {
            self.shared.leave_pending(stream);
        } else {
            self.shared.abort(stream);
        }
    }

    /// Announces an event stream whose socket will be handed over. Call it before the request is submitted.
    pub fn announce(&self, stream: StreamId, max_unsent_bytes: usize) {
        self.writer.announce(stream, max_unsent_bytes);
    }

    /// Writes what follows the first record of an announced stream to `socket`, in HTTP's chunks; only the last
    /// record goes to Python. The client may leave bytes unread for `write_limit`.
    pub fn hand_over(&self, stream: StreamId, socket: OwnedFd, write_limit: Duration) {
        self.writer.hand_over(stream, socket, write_limit);
    }

    /// Python is done with an announced stream.
    pub fn release(&self, stream: StreamId) {
        self.writer.release(stream);
    }

    /// Writes bytes to every stream that was handed over and waits for its next record.
    pub fn comment(&self, comment: &[u8]) {
        self.writer.comment(comment);
    }

    /// What the streams have to write, as records.
    pub fn take(&self) -> Vec<u8> {
        self.shared.python_queue.take()
    }

    /// The model in JSON.
    pub fn describe(&self) -> String {
        self.model.describe(self.max_model_len)
    }

    /// Phase and health, in JSON.
    pub fn status(&self) -> Vec<u8> {
        self.shared.status.report(self.shared.clock.now())
    }

    /// Prometheus text.
    pub fn metrics(&self) -> String {
        let shared = &self.shared;
        let queues = [&shared.output_queue, &shared.python_queue];
        for (gauge, queue) in shared.metrics.untaken_bytes.iter().zip(queues) {
            gauge.set(i64::try_from(queue.num_untaken()).unwrap_or(i64::MAX));
        }
        shared.metrics.render()
    }

    /// A rank's process ended. Its Fail, which tells more, may still be on its way.
    pub fn worker_lost(&self, rank: u32, reason: &str) {
        self.report_rank(rank, reason, false);
    }

    /// A rank's process was killed, or is stopped: it has nothing more to say.
    pub fn worker_killed(&self, rank: u32, reason: &str) {
        self.report_rank(rank, reason, true);
    }

    fn report_rank(&self, rank: u32, reason: &str, is_silenced: bool) {
        let replicas = self.shared.replicas();
        if let Some(replica) = replicas.get((rank / self.settings.num_ranks) as usize) {
            replica.mailbox.put(Mail::RankEnded {
                rank,
                reason: reason.to_owned(),
                is_silenced,
            });
        }
    }

    /// Opens a link for new ranks of a replica that lost its own, which have all ended. They dial what is returned,
    /// with a configuration of this fingerprint.
    pub fn restart_ranks(&self, replica: u32, config: Fingerprint) -> Result<String, LinkError> {
        let num_losses = self.shared.status.replica(replica).num_losses();
        let name = format!("link-{replica}-{num_losses}");
        let link = bind_link(&self.settings, replica, &name)?;
        let (endpoint, _) = link.endpoints();
        let own = self.shared.replica(replica);
        own.set_next_ranks(NextRanks { link, config });
        Ok(endpoint)
    }

    /// No new ranks start for a replica that lost its own: it fails, and its streams end.
    pub fn give_up(&self, replica: u32, why: &str) {
        let mailbox = &self.shared.replica(replica).mailbox;
        mailbox.put(Mail::GiveUp(why.to_owned()));
    }

    /// Ends a stream for an operator: its client reads that. Unknown or ended streams are fine.
    pub fn end_stream(&self, stream: StreamId) {
        let error = ApiError::ended_by_operator();
        if self.text.forget(stream) {
            if self.shared.leave_pending(stream) {
                self.shared.output_queue.put_error(stream, &error);
            }
        } else {
            self.shared.end_stream(stream, error);
        }
    }

    /// Prompts find nothing of what was computed before. Requests that run go on.
    pub fn flush_cache(&self) {
        self.shared.tell_all(&Mail::FlushCache);
    }

    /// Plans no step until it is called again with false. Requests are taken and wait.
    pub fn pause(&self, is_paused: bool) {
        self.shared.tell_all(&Mail::Pause(is_paused));
    }

    /// JSON of all requests that replicas have, and of the replicas that have not answered in time; None if none has.
    pub fn list_requests(&self) -> Option<Vec<u8>> {
        let replicas = self.shared.replicas();
        let asked = replicas.iter().map(|replica| {
            let num_before = replica.listing.num_answers();
            replica.mailbox.put(Mail::ListRequests);
            (replica, num_before)
        });
        let asked: Vec<_> = asked.collect();
        let (mut all, deadline) = (ListedReplicas::default(), Instant::now() + ANSWER_TIMEOUT);
        for (replica, num_before) in asked {
            match replica.listing.wait(num_before, deadline) {
                Some(listed) => all.requests.extend(listed),
                None => all.silent_replicas.push(replica.number),
            }
        }
        let is_answered = all.silent_replicas.len() < replicas.len();
        is_answered.then(|| serde_json::to_vec(&all).expect("numbers always encode"))
    }

    /// Changes the level of the engine's log lines: `debug`, `info`, `warning` or `error`; false for another word.
    pub fn set_log_level(&self, level: &str) -> bool {
        logging::set_level(level)
    }

    /// Rejects new requests, finishes those under way, and shuts the ranks down; ends in `stopped`.
    pub fn drain(&self) {
        self.shared.pending_streams.close();
        self.shared.tell_all(&Mail::Drain);
    }

    /// Ends the threads now; open streams end with an error. Further calls do nothing.
    pub fn close(&self) {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        if threads.is_empty() {
            return;
        }
        self.shared.reject_pending();
        self.shared.output_queue.close();
        self.shared.python_queue.close();
        self.text.close();
        self.shared.tell_all(&Mail::Close);
        for thread in threads.drain(..) {
            // The thread's sentinel has reported a panic.
            let _panicked = thread.join();
        }
        self.writer.sync();
        self.shared.status.stop();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.close();
    }
}

/// What prepares requests before a replica has them.
struct TextSide {
    queue: Arc<TextQueue>,
    compiles: Arc<CompileQueue>,
    grammars: Arc<Grammars>,
}

impl TextSide {
    fn spawn(
        threads: &mut Threads,
        intake: &Arc<Intake>,
        model: &Arc<ModelText>,
        replica: &ReplicaConfig,
    ) -> io::Result<Self> {
        let settings = &replica.settings;
        let queue = TextQueue::new(settings.scheduler.max_queue, settings.text_threads);
        let queue = Arc::new(queue);
        let compiles = Arc::new(CompileQueue::new(num_compile_threads()));
        let grammars = grammars(&intake.shared);
        let worker = TextWorker {
            model: model.clone(),
            max_model_len: replica.max_model_len,
            policy: settings.scheduler.policy,
            seeds: SeedSource::new(settings.seed),
            grammars: grammars.clone(),
            logprobs: LogprobsBudget::default(),
            intake: intake.clone(),
            compiles: compiles.clone(),
            queue: queue.clone(),
        };
        threads.spawn_text(&Arc::new(worker), settings.text_threads)?;
        let worker = CompileWorker {
            model: model.clone(),
            grammars: grammars.clone(),
            intake: intake.clone(),
            queue: compiles.clone(),
        };
        threads.spawn_compilers(&Arc::new(worker))?;
        Ok(Self {
            queue,
            compiles,
            grammars,
        })
    }

    /// Whether a request waited to be tokenised or compiled. It does no longer.
    fn forget(&self, stream: StreamId) -> bool {
        self.queue.forget(stream) || self.compiles.forget(stream)
    }

    /// No request is prepared from now on.
    fn close(&self) {
        self.queue.close();
        self.compiles.close();
        self.grammars.close();
    }
}

fn grammars(shared: &Shared) -> Arc<Grammars> {
    let metrics = shared.metrics.grammars.clone();
    Arc::new(Grammars::new(move |kind, outcome| {
        metrics.count(kind, outcome);
    }))
}

/// Of the tenant with most waiting requests, the last is rejected.
fn queue_full(put: &Put) -> ApiError {
    let mut error = ApiError::overloaded(format!(
        "the queue is full: {} requests wait to be tokenised, and no tenant has more of them than this one's; try \
         again later",
        put.num_waiting
    ));
    error.retry_after_seconds = Some(put.retry_after_seconds);
    error
}

/// The replicas' places in the group, if there is one; no other engine has answered yet.
fn join(settings: Option<GroupSettings>, shared: &Shared) -> Result<Vec<Grouped>, GroupProblem> {
    let Some(settings) = settings else {
        return Ok(Vec::new());
    };
    let replicas = shared.replicas().iter();
    let wakeups = replicas.map(|replica| replica.mailbox.wakeup().clone());
    // The engine's clock starts when its threads do.
    let seats = Seat::of_engine(&settings, wakeups.collect(), Micros(0))?;
    let places = seats.into_iter().map(|seat| Grouped::new(seat, &settings));
    Ok(places.collect())
}

/// Opens the sockets that the settings ask for: those of each replica, or none.
fn publish_kv_events(
    settings: &EngineSettings,
    shared: &Shared,
) -> Result<Vec<(KvEventSender, Publisher)>, StartError> {
    let published =
        (0..settings.num_replicas).map(|replica| publish_for(settings, shared, replica));
    let published: Result<Vec<Option<_>>, _> = published.collect();
    Ok(published?.into_iter().flatten().collect())
}

fn publish_for(
    settings: &EngineSettings,
    shared: &Shared,
    replica: u32,
) -> Result<Option<(KvEventSender, Publisher)>, StartError> {
    let Some(asked) = &settings.kv_events else {
        return Ok(None);
    };
    let asked = asked.of_replica(replica);
    let Some(endpoint) = asked.endpoint(settings.pages.prefix_cache)? else {
        return Ok(None);
    };
    let origin = Origin {
        replica: settings.replica_number(replica),
        hash_key_id: settings.hash_key.map(HashKey::id).unwrap_or_default(),
    };
    let queue = Arc::new(KvEventQueue::new()?);
    let own = shared.metrics.replica(replica);
    let num_messages = own.num_kv_event_messages.clone();
    let publisher = Publisher::bind(&asked, endpoint, origin, queue.clone(), num_messages)?;
    tracing::info!(
        replica,
        "KV events at {}",
        publisher.endpoints().join(", all pages at ")
    );
    Ok(Some((KvEventSender(queue), publisher)))
}

fn create_step_trace(path: &Path) -> Result<(StepRecorder, StepFile), StartError> {
    StepFile::create(path).map_err(|source| StartError::StepTrace {
        path: path.to_owned(),
        source,
    })
}

/// A socket for each replica. The only one's has no number.
fn bind_links(settings: &EngineSettings) -> Result<Vec<Link>, LinkError> {
    let num_replicas = settings.num_replicas;
    let bind = |replica| {
        let name = match num_replicas {
            1 => "link".to_owned(),
            _ => format!("link-{replica}"),
        };
        bind_link(settings, replica, &name)
    };
    (0..num_replicas).map(bind).collect()
}

fn bind_link(settings: &EngineSettings, replica: u32, name: &str) -> Result<Link, LinkError> {
    let num_replicas = settings.num_replicas;
    let ranks = RankRange::of_replica(replica, settings.num_ranks, num_replicas);
    let remote = settings.remote_workers.as_ref();
    let remote = remote.map(|remote| remote.of_replica(replica, ranks, num_replicas));
    Link::bind(
        &settings.run_dir,
        name,
        ranks,
        remote.transpose()?.flatten(),
    )
}

/// Pages are hashed with the key of the replicas' own caches.
fn routes(settings: &EngineSettings) -> Routes {
    let pages = &settings.pages;
    let hash_key = settings.hash_key.filter(|_| pages.prefix_cache);
    Routes::new(
        settings.num_replicas,
        pages.page_size,
        hash_key.map(HashKey::seed),
    )
}

/// The engine's threads as they are started.
struct Threads {
    shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
}

impl Threads {
    fn new(shared: Arc<Shared>) -> Self {
        let handles = Vec::new();
        Self { shared, handles }
    }

    /// A thread of one replica, with its number unless it is the first.
    fn spawn_for(
        &mut self,
        replica: &ReplicaShared,
        name: &str,
        run: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        match replica.number {
            0 => self.spawn(name, run),
            number => self.spawn(&format!("{name}-{number}"), run),
        }
    }

    fn spawn_masks(&mut self, vocab_size: u32) -> io::Result<MaskJobs> {
        let (jobs, mask_threads) = mask_threads(vocab_size);
        for thread in mask_threads {
            self.spawn("plait-mask", move || thread.run())?;
        }
        Ok(jobs)
    }

    fn spawn_text(&mut self, worker: &Arc<TextWorker>, num_threads: u32) -> io::Result<()> {
        for _ in 0..num_threads {
            let worker = worker.clone();
            self.spawn("plait-text", move || worker.run())?;
        }
        Ok(())
    }

    fn spawn_compilers(&mut self, worker: &Arc<CompileWorker>) -> io::Result<()> {
        for _ in 0..num_compile_threads() {
            let worker = worker.clone();
            self.spawn("plait-compile", move || worker.run())?;
        }
        Ok(())
    }

    /// The threads that write what the replicas have made.
    fn spawn_writers(
        &mut self,
        ended: Receiver<EndedResponse>,
        step_file: Option<StepFile>,
        publishers: Vec<Publisher>,
    ) -> io::Result<()> {
        let shared = self.shared.clone();
        self.spawn("plait-bodies", move || write_bodies(&shared, &ended))?;
        if let Some(file) = step_file {
            self.spawn("plait-records", move || file.run())?;
        }
        for publisher in publishers {
            self.spawn("plait-kv-events", move || publisher.run())?;
        }
        Ok(())
    }

    fn spawn(&mut self, name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let sentinel = Sentinel(self.shared.clone());
        let thread = thread::Builder::new().name(name.to_owned());
        self.handles.push(thread.spawn(move || {
            let _sentinel = sentinel;
            run();
        })?);
        Ok(())
    }
}
