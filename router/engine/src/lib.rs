//! Link and driver around Plait's scheduler.
//!
//! [`Engine`] is the facade that Python holds. Its threads: two prepare text, others compile
//! constraints and fill masks, one drives (scheduler and link), one makes answers, one writes event streams to their sockets.
//! None of them ever enters the interpreter.

pub mod group;

mod allowlist;
mod clock;
mod compile_pool;
mod compile_queue;
mod deadlines;
mod driver;
mod engine;
mod event_streams;
mod first_uses;
mod generation_settings;
mod grammar_metrics;
mod handshake;
mod histogram;
mod intake;
mod kv_events;
mod link;
mod listing;
mod live_request;
mod logging;
mod logprobs;
mod loss_metrics;
mod lossy_stderr;
mod mailbox;
mod masks;
mod metrics;
mod moved_stream;
mod output;
mod output_queue;
mod pending_streams;
mod rank_range;
mod receive_frames;
mod remote_link;
mod remote_workers;
mod replica_pools;
mod request_seeds;
mod routes;
mod serving;
mod settings;
mod shared;
mod socket_options;
mod status;
mod step;
mod step_model_metrics;
mod step_trace;
mod store;
mod stream_times;
mod stream_writer;
mod text_pool;
mod text_queue;
mod timeouts;
mod turns;
mod wakeup;
mod writable;

pub use clock::{Clock, SystemClock};
pub use engine::{Engine, StartError};
pub use output_queue::{ERROR, GONE, LAST, StreamId, TOO_SLOW, USED};
pub use settings::{EngineSettings, GroupKeys, GroupMembership, LogLevel, SettingsProblem};
pub use timeouts::Timeouts;
pub use wakeup::Wakeup;
