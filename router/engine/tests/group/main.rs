//! Claims about engines that step together: real schedulers and real ZeroMQ, a thread or a process an
//! engine, on devices whose tokens follow from the KV that they really see.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says where")]
#![allow(clippy::cast_possible_wrap, reason = "small numbers")]

mod agreement;
mod dropped_messages;
mod engines;
mod exchange;
mod failures;
mod keys;

#[path = "../../../core/tests/core/fake_device.rs"]
#[allow(dead_code, reason = "the core's own tests need more of it")]
mod fake_device;
#[path = "../../../core/tests/core/harness.rs"]
#[allow(dead_code, reason = "the core's own tests need more of it")]
mod harness;
#[path = "../../../core/tests/core/masks.rs"]
#[allow(dead_code, reason = "the core's own tests need more of it")]
mod masks;
#[path = "../../../core/tests/core/oracle.rs"]
#[allow(dead_code, reason = "the core's own tests need more of it")]
mod oracle;
#[path = "../../../core/tests/core/slot_memory.rs"]
#[allow(dead_code, reason = "the core's own tests need more of it")]
mod slot_memory;
#[path = "../../../core/tests/core/spec.rs"]
#[allow(dead_code, reason = "the core's own tests need more of it")]
mod spec;
