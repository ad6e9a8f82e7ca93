//! Python bindings of Plait's engine and simulator, and nothing else.

use std::os::fd::{BorrowedFd, RawFd};
use std::time::Duration;

use plait_engine::{Engine as CoreEngine, StartError};
use plait_sim::{ModelSize, Settings, Setup, SimError, simulate};
use pyo3::create_exception;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

create_exception!(
    plait._router,
    ModelFilesError,
    PyValueError,
    "The model's files cannot be served (exit code 4)."
);

/// Replicas behind one front door; see `_router.pyi`.
#[pyclass(frozen, module = "plait._router")]
struct Engine(CoreEngine);

#[pymethods]
impl Engine {
    #[new]
    fn new(py: Python<'_>, settings: &[u8]) -> PyResult<Self> {
        py.detach(|| CoreEngine::start(settings))
            .map(Self)
            .map_err(raised)
    }

    #[getter]
    fn endpoints(&self) -> Vec<String> {
        self.0.endpoints().to_vec()
    }

    #[getter]
    fn remote_endpoints(&self) -> Vec<Option<String>> {
        self.0.remote_endpoints().to_vec()
    }

    #[getter]
    fn event_fd(&self) -> i32 {
        self.0.event_fd()
    }

    fn set_config_fingerprint(&self, fingerprint: [u8; 16]) {
        self.0.set_config_fingerprint(fingerprint);
    }

    fn submit(&self, stream: u64, tenant: u64, request: &[u8]) {
        self.0.submit(stream, tenant, request);
    }

    fn submit_text(&self, stream: u64, tenant: u64, call: &[u8]) {
        self.0.submit_text(stream, tenant, call);
    }

    fn abort(&self, stream: u64) {
        self.0.abort(stream);
    }

    fn announce(&self, stream: u64, max_unsent_bytes: usize) {
        self.0.announce(stream, max_unsent_bytes);
    }

    fn hand_over(&self, stream: u64, socket: RawFd, write_seconds: f64) -> PyResult<()> {
        let invalid = |error| PyValueError::new_err(format!("write_seconds: {error}"));
        let write_limit = Duration::try_from_secs_f64(write_seconds).map_err(invalid)?;
        // SAFETY: the caller has it open during this call, which duplicates it.
        let socket = unsafe { BorrowedFd::borrow_raw(socket) }.try_clone_to_owned()?;
        self.0.hand_over(stream, socket, write_limit);
        Ok(())
    }

    fn release(&self, stream: u64) {
        self.0.release(stream);
    }

    fn comment(&self, comment: &[u8]) {
        self.0.comment(comment);
    }

    fn take<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.take())
    }

    fn describe<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.describe().as_bytes())
    }

    fn status<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.status())
    }

    fn metrics<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, py.detach(|| self.0.metrics()).as_bytes())
    }

    fn worker_lost(&self, rank: u32, reason: &str) {
        self.0.worker_lost(rank, reason);
    }

    fn worker_killed(&self, rank: u32, reason: &str) {
        self.0.worker_killed(rank, reason);
    }

    fn restart_ranks(&self, replica: u32, fingerprint: [u8; 16]) -> PyResult<String> {
        let link = self.0.restart_ranks(replica, fingerprint);
        link.map_err(|error| PyOSError::new_err(error.to_string()))
    }

    fn give_up(&self, replica: u32, why: &str) {
        self.0.give_up(replica, why);
    }

    fn end_stream(&self, stream: u64) {
        self.0.end_stream(stream);
    }

    fn flush_cache(&self) {
        self.0.flush_cache();
    }

    fn pause(&self, is_paused: bool) {
        self.0.pause(is_paused);
    }

    fn list_requests<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        let listed = py.detach(|| self.0.list_requests())?;
        Some(PyBytes::new(py, &listed))
    }

    fn set_log_level(&self, level: &str) -> PyResult<()> {
        if self.0.set_log_level(level) {
            return Ok(());
        }
        Err(PyValueError::new_err(format!(
            "the log level is {level:?}; allowed: debug, info, warning, error"
        )))
    }

    fn drain(&self) {
        self.0.drain();
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }
}

/// A trace and what serves it; see `_router.pyi`.
#[pyclass(frozen, module = "plait._router")]
struct Simulation(Setup);

#[pymethods]
impl Simulation {
    #[new]
    fn new(py: Python<'_>, settings: &[u8]) -> PyResult<Self> {
        py.detach(|| Settings::parse(settings)?.set_up())
            .map(Self)
            .map_err(|error| unfit(&error))
    }

    #[getter]
    fn num_requests(&self) -> usize {
        self.0.arrivals.len()
    }

    fn run<'py>(
        &self,
        py: Python<'py>,
        on_progress: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let on_progress = on_progress.clone().unbind();
        let mut raised = None;
        let mut tell = |num_arrived| {
            let told = Python::attach(|py| {
                py.check_signals()?;
                on_progress.call1(py, (num_arrived,)).map(drop)
            });
            raised = raised.take().or(told.err());
            raised.is_none()
        };
        let report = py.detach(|| simulate(&self.0, &mut tell));
        match raised {
            Some(error) => Err(error),
            None => Ok(PyBytes::new(
                py,
                &report.map_err(|error| unfit(&error))?.to_json(),
            )),
        }
    }
}

fn unfit(error: &SimError) -> PyErr {
    match error {
        SimError::File { .. } => PyOSError::new_err(error.to_string()),
        _ => PyValueError::new_err(error.to_string()),
    }
}

fn raised(error: StartError) -> PyErr {
    match error {
        StartError::Model(error) => ModelFilesError::new_err(error.to_string()),
        StartError::Settings(error) => PyValueError::new_err(error.to_string()),
        StartError::Link(error) => PyValueError::new_err(error.to_string()),
        StartError::Group(error) => PyValueError::new_err(error.to_string()),
        StartError::KvEvents(error) => PyValueError::new_err(error.to_string()),
        StartError::StepTrace { .. } => PyValueError::new_err(error.to_string()),
        StartError::System(error) => PyOSError::new_err(error.to_string()),
    }
}

/// JSON of [`ModelSize`]; see `_router.pyi`.
#[pyfunction]
fn model_size<'py>(py: Python<'py>, config: &str) -> PyResult<Bound<'py, PyBytes>> {
    let size = ModelSize::read(config).map_err(|error| unfit(&error))?;
    Ok(PyBytes::new(py, &size.to_json()))
}

#[pymodule]
fn _router(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Engine>()?;
    module.add_class::<Simulation>()?;
    module.add_function(wrap_pyfunction!(model_size, module)?)?;
    module.add("ModelFilesError", module.py().get_type::<ModelFilesError>())
}
