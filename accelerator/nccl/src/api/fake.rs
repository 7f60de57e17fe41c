//! Libraries that are not there: they keep a list of calls, hold handles against their use, and fail
//! when they are told to.

#![expect(unsafe_code, reason = "the trait's methods are unsafe to call")]

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use super::{
    Api, CallError, CallResult, Comm, Context, Device, EventHandle, Foreign, Operation, Progress,
    StreamHandle,
};

/// Two GPUs.
#[derive(Debug)]
pub(crate) struct Fake {
    nccl: u32,
    driver: u32,
    context_events: bool,
    id: u8,
    state: Mutex<FakeState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct FakeState {
    calls: Vec<String>,
    handles: HashSet<Handle>,
    made: usize,
    memory: HashMap<u64, Vec<u8>>,
    entered: HashMap<ThreadId, usize>,
    /// The number of times that NCCL says that it is not ready, after each call.
    polls: usize,
    left: usize,
    nccl_fault: Option<String>,
    failing: Option<&'static str>,
    /// Operations do not end any more, so that what is finalized waits for them.
    stuck: bool,
    finalizing: bool,
    looks: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Handle {
    Context(usize),
    Stream(usize),
    Event(usize),
    Comm(usize),
}

impl Fake {
    pub(crate) fn new() -> Self {
        Self {
            nccl: 22_703,
            driver: 12_090,
            context_events: true,
            id: 1,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    pub(crate) fn with_nccl(self, nccl: u32) -> Self {
        Self { nccl, ..self }
    }

    pub(crate) fn with_driver(self, driver: u32) -> Self {
        Self { driver, ..self }
    }

    pub(crate) fn without_context_events(self) -> Self {
        Self {
            context_events: false,
            ..self
        }
    }

    /// Sets the byte of which the ids that it makes consist.
    pub(crate) fn with_id(self, id: u8) -> Self {
        Self { id, ..self }
    }

    /// Makes NCCL say so often, after each call, that it is not ready.
    pub(crate) fn with_polls(self, polls: usize) -> Self {
        self.lock().polls = polls;
        self
    }

    /// Lets calls that begin so fail.
    pub(crate) fn failing(self, call: &'static str) -> Self {
        self.fail(call);
        self
    }

    pub(crate) fn inner(self) -> Arc<Self> {
        Arc::new(self)
    }

    pub(crate) fn fail(&self, call: &'static str) {
        self.lock().failing = Some(call);
    }

    /// NCCL says that something has failed on its own.
    pub(crate) fn fail_nccl(&self, text: &str) {
        self.lock().nccl_fault = Some(text.to_owned());
    }

    /// Operations do not end any more, as if a peer were gone.
    pub(crate) fn stick(&self) {
        self.lock().stuck = true;
    }

    pub(crate) fn calls(&self) -> Vec<String> {
        self.lock().calls.clone()
    }

    pub(crate) fn count(&self, call: &str) -> usize {
        let state = self.lock();
        let calls = state.calls.iter().filter(|made| made.starts_with(call));
        calls.count()
    }

    pub(crate) fn memory(&self) -> Vec<u64> {
        self.lock().memory.keys().copied().collect()
    }

    /// Returns how often NCCL was asked for its progress.
    pub(crate) fn looks(&self) -> usize {
        self.lock().looks
    }

    /// Waits until that call was made.
    pub(crate) fn await_call(&self, call: &str) {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut state = self.lock();
        while !state.calls.iter().any(|made| made.starts_with(call)) {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "no {call} among {:?}", state.calls);
            state = self.changed.wait_timeout(state, left).unwrap().0;
        }
    }

    /// Checks that nothing was left behind.
    pub(crate) fn assert_clean(&self) {
        let state = self.lock();
        assert!(state.handles.is_empty(), "{:?} are left", state.handles);
        assert!(state.memory.is_empty());
        assert!(state.entered.values().all(|depth| *depth == 0));
    }

    fn lock(&self) -> MutexGuard<'_, FakeState> {
        self.state.lock().unwrap()
    }

    fn called(&self, state: &mut FakeState, call: String) -> CallResult<()> {
        let failing = state
            .failing
            .is_some_and(|failing| call.starts_with(failing));
        let fault = CallError {
            of: Foreign::Cuda,
            call: "a call",
            text: call.clone(),
        };
        state.calls.push(call);
        self.changed.notify_all();
        if failing { Err(fault) } else { Ok(()) }
    }
}

impl FakeState {
    fn make(&mut self, handle: fn(usize) -> Handle) -> usize {
        self.made += 1;
        self.handles.insert(handle(self.made));
        self.made
    }

    fn uses(&self, handle: Handle) {
        assert!(self.handles.contains(&handle), "{handle:?} is no more");
        self.is_entered();
    }

    fn takes_back(&mut self, handle: Handle) {
        assert!(self.handles.remove(&handle), "{handle:?} is no more");
    }

    fn is_entered(&self) {
        let depth = self.entered.get(&thread::current().id());
        assert!(
            depth.is_some_and(|depth| *depth > 0),
            "no context is current"
        );
    }

    fn begin(&mut self) -> Progress {
        self.left = self.polls;
        self.standing()
    }

    fn standing(&self) -> Progress {
        match self.left {
            0 if !(self.finalizing && self.stuck) => Progress::Done,
            _ => Progress::UnderWay,
        }
    }
}

impl Api for Fake {
    fn driver_version(&self) -> CallResult<u32> {
        Ok(self.driver)
    }

    fn has_context_events(&self) -> bool {
        self.context_events
    }

    fn gpu_count(&self) -> CallResult<usize> {
        Ok(2)
    }

    fn device(&self, ordinal: i32) -> CallResult<Device> {
        Ok(Device(ordinal))
    }

    fn bus_id(&self, device: Device) -> CallResult<String> {
        Ok(format!("0000:{:02X}:00.0", device.0))
    }

    fn retain(&self, device: Device) -> CallResult<Context> {
        let mut state = self.lock();
        self.called(&mut state, format!("retain {}", device.0))?;
        state.handles.insert(Handle::Context(device.0 as usize));
        Ok(Context(device.0 as usize))
    }

    unsafe fn release(&self, device: Device) {
        let mut state = self.lock();
        state.takes_back(Handle::Context(device.0 as usize));
        let _ = self.called(&mut state, format!("release {}", device.0));
    }

    unsafe fn enter(&self, context: Context) -> CallResult<()> {
        let mut state = self.lock();
        assert!(state.handles.contains(&Handle::Context(context.0)));
        *state.entered.entry(thread::current().id()).or_default() += 1;
        Ok(())
    }

    unsafe fn leave(&self) {
        let mut state = self.lock();
        *state.entered.get_mut(&thread::current().id()).unwrap() -= 1;
    }

    unsafe fn synchronize(&self) -> CallResult<()> {
        let mut state = self.lock();
        state.is_entered();
        self.called(&mut state, "synchronize".into())
    }

    unsafe fn create_stream(&self) -> CallResult<StreamHandle> {
        let mut state = self.lock();
        state.is_entered();
        Ok(StreamHandle(state.make(Handle::Stream)))
    }

    unsafe fn destroy_stream(&self, stream: StreamHandle) {
        self.lock().takes_back(Handle::Stream(stream.0));
    }

    unsafe fn create_event(&self) -> CallResult<EventHandle> {
        let mut state = self.lock();
        state.is_entered();
        Ok(EventHandle(state.make(Handle::Event)))
    }

    unsafe fn destroy_event(&self, event: EventHandle) {
        self.lock().takes_back(Handle::Event(event.0));
    }

    unsafe fn record(&self, event: EventHandle, stream: StreamHandle) -> CallResult<()> {
        let mut state = self.lock();
        state.uses(Handle::Event(event.0));
        state.uses(Handle::Stream(stream.0));
        assert_eq!(
            state.standing(),
            Progress::Done,
            "the stream lacks the operation"
        );
        self.called(&mut state, "record".into())
    }

    unsafe fn record_context(&self, event: EventHandle, context: Context) -> CallResult<()> {
        let mut state = self.lock();
        state.uses(Handle::Event(event.0));
        state.uses(Handle::Context(context.0));
        self.called(&mut state, "context: record".into())
    }

    unsafe fn query(&self, event: EventHandle) -> CallResult<Progress> {
        let state = self.lock();
        state.uses(Handle::Event(event.0));
        match (state.failing, state.stuck) {
            (Some("query"), _) => Err(CallError {
                of: Foreign::Cuda,
                call: "a call",
                text: "query".into(),
            }),
            (_, true) => Ok(Progress::UnderWay),
            (_, false) => Ok(Progress::Done),
        }
    }

    unsafe fn wait_stream(&self, stream: StreamHandle, event: EventHandle) -> CallResult<()> {
        let mut state = self.lock();
        state.uses(Handle::Event(event.0));
        state.uses(Handle::Stream(stream.0));
        self.called(&mut state, "stream waits".into())
    }

    unsafe fn wait_context(&self, context: Context, event: EventHandle) -> CallResult<()> {
        let mut state = self.lock();
        state.uses(Handle::Event(event.0));
        state.uses(Handle::Context(context.0));
        self.called(&mut state, "context: waits".into())
    }

    unsafe fn allocate(&self, bytes: usize) -> CallResult<u64> {
        let mut state = self.lock();
        state.is_entered();
        state.made += 1;
        let at = state.made as u64;
        state.memory.insert(at, vec![0; bytes]);
        Ok(at)
    }

    unsafe fn free(&self, at: u64) {
        self.lock().memory.remove(&at).unwrap();
    }

    unsafe fn write(&self, at: u64, bytes: &[u8]) -> CallResult<()> {
        let mut state = self.lock();
        state.memory.get_mut(&at).unwrap()[..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    unsafe fn read(&self, at: u64, bytes: &mut [u8]) -> CallResult<()> {
        bytes.copy_from_slice(&self.lock().memory[&at][..bytes.len()]);
        Ok(())
    }

    fn nccl_version(&self) -> CallResult<u32> {
        Ok(self.nccl)
    }

    fn unique_id(&self) -> CallResult<[u8; 128]> {
        Ok([self.id; 128])
    }

    unsafe fn connect(&self, id: &[u8; 128], rank: i32, world_size: i32) -> CallResult<Comm> {
        let mut state = self.lock();
        state.is_entered();
        self.called(
            &mut state,
            format!("connect {rank} of {world_size} by {}", id[0]),
        )?;
        state.begin();
        Ok(Comm(state.make(Handle::Comm)))
    }

    unsafe fn progress(&self, comm: Comm) -> CallResult<Progress> {
        let mut state = self.lock();
        state.uses(Handle::Comm(comm.0));
        state.looks += 1;
        if let Some(text) = state.nccl_fault.clone() {
            return Err(CallError {
                of: Foreign::Nccl,
                call: "an operation under way",
                text,
            });
        }
        state.left = state.left.saturating_sub(1);
        Ok(state.standing())
    }

    unsafe fn all_reduce(
        &self,
        comm: Comm,
        stream: StreamHandle,
        at: u64,
        elements: usize,
        operation: Operation,
    ) -> CallResult<Progress> {
        let mut state = self.lock();
        state.uses(Handle::Comm(comm.0));
        state.uses(Handle::Stream(stream.0));
        assert_eq!(state.standing(), Progress::Done, "NCCL is not ready");
        self.called(&mut state, format!("{operation}, {elements} at {at}"))?;
        Ok(state.begin())
    }

    unsafe fn finalize(&self, comm: Comm) -> CallResult<Progress> {
        let mut state = self.lock();
        state.uses(Handle::Comm(comm.0));
        self.called(&mut state, "finalize".into())?;
        state.finalizing = true;
        Ok(state.begin())
    }

    unsafe fn destroy(&self, comm: Comm) -> CallResult<()> {
        let mut state = self.lock();
        state.takes_back(Handle::Comm(comm.0));
        assert_eq!(state.standing(), Progress::Done, "it is not finalized");
        state.finalizing = false;
        self.called(&mut state, "destroy".into())
    }

    unsafe fn abort(&self, comm: Comm) -> CallResult<()> {
        let mut state = self.lock();
        state.takes_back(Handle::Comm(comm.0));
        (state.stuck, state.finalizing) = (false, false);
        self.called(&mut state, "abort".into())
    }
}
