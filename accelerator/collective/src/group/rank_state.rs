//! The state of one rank in a group: the order of operations, failure, heartbeats, panics, and leaving.

use std::{
    cell::RefCell,
    fmt,
    panic::{self, PanicHookInfo},
    sync::{
        Arc, Once, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU32, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use accelerator_host::sync::{Condvar, Mutex};

use super::engine::{OpContext, Scratch};
use super::flight_recorder::{FlightRecorder, OpOutcome, WaitClock};
use super::observer::{Callback, ExecThread, OpTimer};
use super::options::GroupOptions;
use super::pending::{Ticket, TicketLock};
use crate::{
    buffer::Meter,
    error::{Certainty, Culprit, Error, Kind, Result},
    fingerprint::CollectiveFingerprint,
    liveness::suspect_after,
    rendezvous::StoreClient,
    topology::{Topology, TransportKind},
    transport::{
        Abort, DROPPED, FinalMessage, LeaveKind, OpDeadline, OpNumber, OpTimeouts, Transport,
    },
};

/// The state that all handles of one rank and its communication thread share.
pub(crate) struct RankState {
    /// The state of the same rank in the world, if this group is a part of it: they fail together.
    world: Option<Arc<RankState>>,
    pub(crate) topology: Topology,
    pub(crate) options: GroupOptions,
    pub(crate) transport: Transport,
    pub(super) order: Arc<TicketLock>,
    scratch: Mutex<Scratch>,
    /// Held by the thread that ends the group by a failure.
    failing: Mutex<()>,
    /// The first error of an operation: the answer to every later one.
    failure: OnceLock<Error>,
    /// The ranks that had been silent for long when the group failed.
    suspects: OnceLock<Vec<usize>>,
    left: AtomicBool,
    forbidden: Mutex<Vec<Arc<str>>>,
    pub(super) store: Option<StoreClient>,
    /// Exit notices of the store that the transport has not confirmed, with when they came.
    exit_notices: Mutex<Vec<(usize, String, Instant)>>,
    pub(super) heartbeat: Arc<HeartbeatThread>,
    /// The memory of the buffers that live.
    pub(super) buffers: Meter,
    observer: OnceLock<Callback>,
    /// The last operations of this rank, in all its groups.
    recorder: Arc<FlightRecorder>,
    /// The next number of a group.
    groups: AtomicU32,
    /// The groups of this rank that are parts of this one.
    parts: Mutex<Vec<Weak<RankState>>>,
    /// The host of each rank of the world, by the number of its first rank; set by the first group that is made.
    pub(super) hosts: OnceLock<Vec<usize>>,
}

impl RankState {
    pub(crate) fn new(
        topology: Topology,
        options: GroupOptions,
        transport: Transport,
        store: Option<StoreClient>,
    ) -> Self {
        Self {
            world: None,
            topology,
            options,
            transport,
            order: Arc::default(),
            scratch: Mutex::default(),
            failing: Mutex::default(),
            failure: OnceLock::new(),
            suspects: OnceLock::new(),
            left: AtomicBool::new(false),
            forbidden: Mutex::default(),
            store,
            exit_notices: Mutex::default(),
            heartbeat: Arc::default(),
            buffers: Meter::default(),
            observer: OnceLock::new(),
            recorder: Arc::default(),
            groups: AtomicU32::new(1),
            parts: Mutex::default(),
            hosts: OnceLock::new(),
        }
    }

    /// The state of a rank in a group that is a part of the `world`.
    pub(super) fn in_world(
        world: &Arc<Self>,
        topology: Topology,
        transport: Transport,
    ) -> Arc<Self> {
        let mut state = Self::new(topology, world.options.clone(), transport, None);
        state.world = Some(Arc::clone(world));
        state.recorder = Arc::clone(&world.recorder);
        let state = Arc::new(state);
        let mut parts = world.parts.lock();
        parts.retain(|part| part.strong_count() > 0);
        parts.push(Arc::downgrade(&state));
        drop(parts);
        state
    }

    /// Returns `true` if the group is a part of the world.
    pub(super) fn is_part(&self) -> bool {
        self.world.is_some()
    }

    /// The state of this rank in the world.
    pub(super) fn world(self: &Arc<Self>) -> &Arc<Self> {
        self.world.as_ref().unwrap_or(self)
    }

    /// A number for the next group that this rank makes, which no group of this rank has had.
    pub(super) fn propose_group(&self) -> u32 {
        self.groups.fetch_add(1, Ordering::Relaxed)
    }

    /// Notes that a group has a number, so that later ones have larger ones.
    pub(super) fn note_group(&self, number: u32) {
        self.groups
            .fetch_max(number.saturating_add(1), Ordering::Relaxed);
    }

    /// Starts to detect failures: installs the panic hook, and starts the heartbeat thread if the ranks are
    /// processes. A world of one has neither.
    pub(crate) fn start_failure_detection(self: &Arc<Self>) -> Result<()> {
        if self.topology.world_size() == 1 {
            return Ok(());
        }
        install_hook(self);
        if self.transport.kind() == TransportKind::Threads {
            return Ok(());
        }
        if let Some(store) = &self.store {
            let heartbeat = Arc::clone(&self.heartbeat);
            store.on_event(move || heartbeat.wake());
            let recorder = Arc::clone(&self.recorder);
            store.on_records_asked(move || recorder.records());
        }
        // The thread may start late, as when this process is stopped meanwhile.
        let inbox = self.transport.inbox();
        inbox.note_running(self.options.liveness_timeout());
        HeartbeatThread::start(self)
    }

    /// Enables heartbeats and sends the first ones before it returns. Until its first heartbeat arrives, peers allow this
    /// rank the connect timeout in addition to the liveness timeout. The ranks must have agreed on the data path.
    pub(super) fn enable_heartbeats(&self) {
        self.transport.enable_heartbeats();
        let liveness = self.options.liveness_timeout();
        let _ = self.transport.control().heartbeat(liveness);
    }

    /// One round: sends heartbeats, finds silent peers, takes exit notices of the store. Says after how long
    /// the next one is due.
    pub(super) fn heartbeat_round(&self) -> Option<Duration> {
        let pause = self
            .transport
            .control()
            .heartbeat(self.options.liveness_timeout())?;
        let Some(store) = &self.store else {
            return Some(pause);
        };
        let mut notices = self.exit_notices.lock();
        while let Some((rank, text)) = store.next_exit_notice() {
            if rank < self.topology.world_size() && rank != self.topology.rank() {
                notices.push((rank, text, Instant::now()));
            }
        }
        // A rank's own final message may be on its way for a moment.
        notices.retain(|(rank, text, came)| {
            came.elapsed() < FINAL_MESSAGE_DELAY
                || !self.transport.control().report_exit(*rank, text)
        });
        match notices.is_empty() {
            true => Some(pause),
            false => Some(pause.min(FINAL_MESSAGE_DELAY / 4)),
        }
    }

    /// Gives an operation its ticket, or says why not. What is refused here leaves the group as it
    /// was.
    pub(crate) fn admit(&self, fingerprint: &CollectiveFingerprint) -> Result<Ticket> {
        self.check_allowed(fingerprint)?;
        if let Some(root) = fingerprint.root
            && root >= self.topology.world_size()
        {
            return Err(Error::misuse(format!(
                "rank {} called {fingerprint}, but the ranks are 0 to {}",
                self.transport.member(self.topology.rank()),
                self.topology.world_size() - 1
            )));
        }
        self.check_open()?;
        Ok(self.order.take_ticket())
    }

    /// Runs an operation when its ticket is served, and delivers the outcome before the next one
    /// runs.
    pub(super) fn perform<T, R>(
        &self,
        thread: ExecThread,
        ticket: Ticket,
        fingerprint: &CollectiveFingerprint,
        body: impl FnOnce(OpContext<'_>) -> Result<T>,
        deliver: impl FnOnce(Result<T>) -> R,
    ) -> R {
        let permit = self.order.acquire(ticket);
        let number = permit.number();
        if thread == ExecThread::Caller {
            self.recorder.waited.add(permit.waited());
        }
        let now = Instant::now();
        let timer = self.start_timer(thread, number, fingerprint, now);
        let mut deadline = self.deadline(number, fingerprint, self.options.op_timeouts(), now);
        let outcome = self.run_until(number, &mut deadline, body);
        timer.end(fingerprint, OpOutcome::of(&outcome), &deadline);
        deliver(outcome)
    }

    pub(super) fn start_timer(
        &self,
        thread: ExecThread,
        sequence: u64,
        fingerprint: &CollectiveFingerprint,
        now: Instant,
    ) -> OpTimer<'_> {
        let of_world = || self.world.as_ref()?.observer.get();
        let observer = self.observer.get().or_else(of_world);
        let operation = (self.transport.group_id(), sequence);
        OpTimer::begin(
            &self.recorder,
            observer,
            thread,
            operation,
            fingerprint,
            now,
        )
    }

    pub(super) fn wait_clock(&self) -> &Arc<WaitClock> {
        &self.recorder.waited
    }

    /// See [`ProcessGroup::observe`](super::ProcessGroup::observe).
    pub(super) fn observe(&self, observer: Callback) -> Result<()> {
        self.observer.set(observer).map_err(|_| {
            let rank = self.topology.rank();
            let text = format!("rank {rank} has an observer already; join the two into one");
            Error::misuse(text)
        })
    }

    /// The clock of an operation that begins `now`.
    pub(super) fn deadline(
        &self,
        sequence: u64,
        fingerprint: &CollectiveFingerprint,
        timeouts: OpTimeouts,
        now: Instant,
    ) -> OpDeadline {
        let rank = self.transport.member(self.topology.rank());
        let number = self.transport.op_number(sequence);
        OpDeadline::new(rank, number, *fingerprint, timeouts, now)
    }

    /// Runs an operation on this thread, from its beginning to its end.
    pub(super) fn run_op<T>(
        &self,
        sequence: u64,
        fingerprint: &CollectiveFingerprint,
        timeouts: OpTimeouts,
        body: impl FnOnce(OpContext<'_>) -> Result<T>,
    ) -> Result<T> {
        let mut deadline = self.deadline(sequence, fingerprint, timeouts, Instant::now());
        self.run_until(sequence, &mut deadline, body)
    }

    fn run_until<T>(
        &self,
        sequence: u64,
        deadline: &mut OpDeadline,
        body: impl FnOnce(OpContext<'_>) -> Result<T>,
    ) -> Result<T> {
        self.check_open()?;
        let _abort_on_panic = AbortOnPanic { rank_state: self };
        // Every operation starts by clearing the scratch memory.
        let mut scratch = self.scratch.lock();
        let ctx = OpContext::new(&self.transport, deadline, &mut scratch);
        body(ctx).map_err(|error| self.fail(sequence, error))
    }

    /// Leaves in good order, after everything that was started. Does nothing if the final
    /// message has been sent.
    pub(crate) fn close(&self) {
        if self.left.load(Ordering::Acquire) {
            return;
        }
        // Their operations would be cut off.
        let parts = std::mem::take(&mut *self.parts.lock());
        for part in parts.iter().filter_map(Weak::upgrade) {
            part.close();
        }
        let ticket = self.order.take_ticket();
        let _turn = self.order.acquire(ticket);
        if self.send_final_message(&FinalMessage::Goodbye(LeaveKind::Closed))
            && let Some(store) = &self.store
        {
            store.leave();
        }
    }

    /// Leaves because the last handle is gone; waits a moment for what was started.
    pub(crate) fn leave(&self) {
        if thread::panicking() {
            self.abort(&last_panic());
        } else if self.order.is_idle_within(DROP_WAIT) {
            self.send_final_message(&FinalMessage::Goodbye(LeaveKind::Dropped));
        } else {
            self.abort(
                "it dropped its group while operations that it had started were pending; wait for \
                 them, or close the group",
            );
        }
    }

    pub(crate) fn abort(&self, reason: &str) {
        if self.left.load(Ordering::Acquire) {
            return;
        }
        let me = self.transport.peer(self.topology.rank());
        let sequence = self.order.serving();
        let error = Error::blaming(
            Kind::PeerLost,
            me.culprit(reason, Certainty::Settled),
            format!("{me} is lost: {reason}; it was at collective #{sequence}"),
        );
        self.fail(sequence, error);
    }

    /// See [`ProcessGroup::failure`](super::ProcessGroup::failure).
    pub(crate) fn failure(&self) -> Option<String> {
        if let (Some(world), Some(group)) = (&self.world, self.transport.subset()) {
            let dropped = || {
                let rank = self.transport.inbox().dropped_member(group.id)?;
                let peer = &self.transport.peers()[rank];
                Some(format!("{peer} is lost: {DROPPED}"))
            };
            return world.failure().or_else(dropped);
        }
        if let Some(error) = self.failure.get() {
            return Some(error.to_string());
        }
        let (inbox, peers) = (self.transport.inbox(), self.transport.peers());
        inbox.failure_text(self.topology.rank(), peers)
    }

    /// See [`ProcessGroup::lost`](super::ProcessGroup::lost).
    pub(crate) fn lost(&self) -> Vec<usize> {
        if let Some(world) = &self.world {
            return world.lost();
        }
        let failure = self.failure.get();
        let timeout = failure.map_or(Duration::ZERO, |_| FINAL_MESSAGES_WAIT);
        let inbox = self.transport.inbox();
        let speechless = inbox.wait_for_final_messages(self.topology.rank(), timeout);
        let mut lost = inbox.gone();
        lost.extend(failure.and_then(Error::culprit).map(Culprit::rank));
        let suspects = self.suspects.get().map_or(&[][..], Vec::as_slice);
        // Who has sent a final message lived when this group failed: the store would only tell
        // that it has ended since.
        lost.extend(speechless.into_iter().filter(|rank| {
            let store = self.store.as_ref();
            let exit_notice = store.and_then(|store| store.exit_notice(*rank, Duration::ZERO));
            suspects.contains(rank) || exit_notice.is_some()
        }));
        lost.sort_unstable();
        lost.dedup();
        lost
    }

    pub(crate) fn forbid(&self, reason: Arc<str>) {
        self.forbidden.lock().push(reason);
    }

    pub(crate) fn allow(&self, reason: &Arc<str>) {
        let mut forbidden = self.forbidden.lock();
        if let Some(index) = forbidden.iter().rposition(|x| Arc::ptr_eq(x, reason)) {
            forbidden.remove(index);
        }
    }

    /// Fails with the reason if a call that communicates must not be made.
    pub(crate) fn check_allowed(&self, call: &dyn fmt::Display) -> Result<()> {
        if let Some(world) = &self.world {
            world.check_allowed(call)?;
        }
        match self.forbidden.lock().last() {
            None => Ok(()),
            Some(reason) => Err(Error::misuse(format!(
                "rank {} called {call} where collectives are forbidden: {reason}",
                self.topology.rank()
            ))),
        }
    }

    pub(super) fn check_open(&self) -> Result<()> {
        if let Some(error) = self.failure.get() {
            return Err(error.clone());
        }
        if let Some(world) = &self.world {
            world.check_open()?;
        }
        if self.left.load(Ordering::Acquire) {
            return Err(Error::closed(format!(
                "the group of rank {} is closed; collectives must come before close()",
                self.transport.member(self.topology.rank())
            )));
        }
        Ok(())
    }

    /// Ends the group, and all groups of this rank with it, unless they have ended before; gives the error with which
    /// they ended.
    pub(super) fn fail(&self, sequence: u64, error: Error) -> Error {
        let world = self.world.as_deref().unwrap_or(self);
        world.fail_in(self.transport.op_number(sequence), error)
    }

    fn fail_in(&self, operation: OpNumber, error: Error) -> Error {
        if self.left.load(Ordering::Acquire) && self.failure.get().is_none() {
            // It has said goodbye, so this is no failure of the world.
            return error;
        }
        // Whoever sees the failure may end the process at once, so the store is told before.
        let _first = self.failing.lock();
        if let Some(earlier) = self.failure.get() {
            return earlier.clone();
        }
        let error = self.ask_store_for_cause(error);
        if let Some(store) = &self.store {
            self.recorder.fail(operation.group, operation.sequence);
            store.report_records(self.recorder.records());
            store.report_failure(&self.error_for_store(&error));
        }
        // Nobody else sets them while the lock is held.
        let silence = suspect_after(self.options.liveness_timeout());
        let _ = self.suspects.set(self.transport.control().silent(silence));
        let _ = self.failure.set(error.clone());
        let abort = error.clone();
        self.send_final_message(&FinalMessage::Abort(Abort {
            group: operation.group,
            sequence: operation.sequence,
            error: abort,
        }));
        error
    }

    /// Adds what the store knows about the end of the culprit, if that may be more.
    fn ask_store_for_cause(&self, error: Error) -> Error {
        let (Some(store), Some(culprit)) = (&self.store, error.culprit()) else {
            return error;
        };
        if culprit.certainty == Certainty::Settled || culprit.rank() == self.topology.rank() {
            return error;
        }
        match store.exit_notice(culprit.rank(), EXIT_NOTICE_WAIT) {
            Some(text) => error.with_exit_notice(&text),
            None => error,
        }
    }

    /// Returns the error to report to the store. For a failure of its own, a rank reports the cause only, since the
    /// store adds who said it, and others where they were.
    fn error_for_store(&self, error: &Error) -> Error {
        match error.culprit() {
            Some(culprit) if culprit.rank() == self.topology.rank() => {
                Error::blaming(error.kind(), culprit.clone(), culprit.cause())
            }
            _ => error.clone(),
        }
    }

    /// Sends the final message, and says whether this call did.
    fn send_final_message(&self, message: &FinalMessage) -> bool {
        if self.left.swap(true, Ordering::AcqRel) {
            return false;
        }
        match (self.transport.subset(), message) {
            (None, _) => {
                self.heartbeat.stop();
                self.transport.control().leave(message);
            }
            // Nobody can be told any more.
            (Some(_), _) if self.check_open().is_err_and(|error| !error.is_closed()) => {}
            (Some(group), FinalMessage::Goodbye(kind)) => {
                self.transport.control().leave_group(group, *kind);
            }
            // It is the world that fails.
            (Some(_), FinalMessage::Abort(_)) => {}
        }
        true
    }
}

impl Drop for RankState {
    fn drop(&mut self) {
        self.heartbeat.stop();
    }
}

impl fmt::Debug for RankState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RankState")
            .field("topology", &self.topology)
            .field("transport", &self.transport.kind())
            .field("operations", &self.order.serving())
            .field("failure", &self.failure.get())
            .finish_non_exhaustive()
    }
}

/// Tells the others when an operation panics, which leaves them in the middle of it.
pub(super) struct AbortOnPanic<'a> {
    pub(super) rank_state: &'a RankState,
}

impl Drop for AbortOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.rank_state.abort(&last_panic());
        }
    }
}

/// Controls the heartbeat thread of a rank.
#[derive(Debug, Default)]
pub(super) struct HeartbeatThread {
    flags: Mutex<Flags>,
    changed: Condvar,
}

impl HeartbeatThread {
    /// Starts the heartbeat thread of a rank. It ends with the rank's final message, or with the `RankState`.
    pub(super) fn start(rank_state: &Arc<RankState>) -> Result<()> {
        let heartbeat = Arc::clone(&rank_state.heartbeat);
        let weak = Arc::downgrade(rank_state);
        thread::Builder::new()
            .name(format!("heartbeat-{}", rank_state.topology.rank()))
            .stack_size(256 * 1024)
            .spawn(move || {
                while !heartbeat.is_stopped() {
                    let Some(rank_state) = weak.upgrade() else {
                        return;
                    };
                    let Some(pause) = rank_state.heartbeat_round() else {
                        return;
                    };
                    drop(rank_state);
                    heartbeat.sleep(pause);
                }
            })
            .map_err(|error| Error::io("the thread of the heartbeat cannot be started", error))?;
        Ok(())
    }

    pub(super) fn stop(&self) {
        self.flags.lock().stopped = true;
        self.changed.notify_all();
    }

    /// Lets it beat at once.
    pub(super) fn wake(&self) {
        self.flags.lock().wakened = true;
        self.changed.notify_all();
    }

    fn is_stopped(&self) -> bool {
        self.flags.lock().stopped
    }

    fn sleep(&self, pause: Duration) {
        let quiet = |flags: &mut Flags| !flags.stopped && !flags.wakened;
        let flags = self.flags.lock();
        let mut flags = self.changed.wait_timeout_while(flags, pause, quiet);
        flags.wakened = false;
    }
}

/// Lets a rank abort its group with the text of a panic. The first call installs a panic hook, in front of
/// the one that was there.
///
/// If panics unwind, the hook only keeps what each thread said, and the rank sends it when
/// the unwinding drops its group: a panic of a thread that holds no group concerns nobody else.
/// If panics abort, nothing unwinds and every panic ends the process, so the hook itself lets
/// all ranks tell.
pub(super) fn install_hook(rank_state: &Arc<RankState>) {
    if cfg!(panic = "abort") {
        let mut ranks = RANKS.lock();
        ranks.retain(|rank_state| rank_state.strong_count() > 0);
        ranks.push(Arc::downgrade(rank_state));
    }
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let earlier = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let text = describe(info);
            if cfg!(panic = "abort") {
                report_panic(&text);
            }
            // The memory of a thread that is ending may be gone.
            let _ = LAST_PANIC.try_with(|last| {
                if let Ok(mut last) = last.try_borrow_mut() {
                    *last = Some(text);
                }
            });
            earlier(info);
        }));
    });
}

/// The text of the panic of this thread, which unwinds.
pub(super) fn last_panic() -> String {
    let last = LAST_PANIC.try_with(|last| last.try_borrow().ok()?.clone());
    match last.ok().flatten() {
        Some(text) => text,
        None => "it panicked".to_owned(),
    }
}

#[derive(Debug, Default)]
struct Flags {
    stopped: bool,
    wakened: bool,
}

fn describe(info: &PanicHookInfo<'_>) -> String {
    let message = info.payload_as_str().unwrap_or("a value that is no text");
    let end = message.char_indices().nth(MAX_MESSAGE_CHARS);
    let message = &message[..end.map_or(message.len(), |(at, _)| at)];
    match info.location() {
        Some(place) => format!(
            "it panicked: {message} (at {}:{})",
            place.file(),
            place.line()
        ),
        None => format!("it panicked: {message}"),
    }
}

/// Lets every rank of the process tell that it is lost, within a moment: the panicking thread
/// may hold what another thread needs for that.
fn report_panic(text: &str) {
    let (sender, done) = mpsc::channel::<()>();
    let text = text.to_owned();
    let spawned = thread::Builder::new().spawn(move || {
        // If the panicking thread itself holds the lock, this waits for ever, and the panic only for `ABORT_SEND_WAIT`.
        let ranks: Vec<Weak<RankState>> = RANKS.lock().clone();
        for rank_state in ranks.iter().filter_map(Weak::upgrade) {
            rank_state.abort(&text);
        }
        drop(sender);
    });
    if spawned.is_ok() {
        let _ = done.recv_timeout(ABORT_SEND_WAIT);
    }
}

thread_local! {
    static LAST_PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

static RANKS: Mutex<Vec<Weak<RankState>>> = Mutex::new(Vec::new());

/// The time that dropping the last handle waits for operations that were started.
const DROP_WAIT: Duration = Duration::from_secs(1);

/// The time to wait for the final messages of others after a failure.
const FINAL_MESSAGES_WAIT: Duration = Duration::from_secs(2);

/// The time that a failing rank waits for what the store knows.
const EXIT_NOTICE_WAIT: Duration = Duration::from_millis(250);

/// The longest time by which the final message of a rank may follow the notice of its end.
const FINAL_MESSAGE_DELAY: Duration = Duration::from_millis(200);

/// The most characters of a panic's message that are reported.
const MAX_MESSAGE_CHARS: usize = 1000;

/// The time that a panic that aborts waits for the abort to be sent.
const ABORT_SEND_WAIT: Duration = Duration::from_millis(1500);
