//! One rank's membership in a group: admission, order, failure and farewell.

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use super::{
    engine::{Exchange, Scratch},
    line::{Line, Ticket},
    options::GroupOptions,
};
use crate::{
    contract::Contract,
    error::{Error, Kind, Result},
    topology::Topology,
    transport::{Abort, Farewell, Transport, Watch},
};

/// What all handles of one rank share.
pub(crate) struct Member {
    pub(crate) topology: Topology,
    pub(crate) options: GroupOptions,
    pub(crate) transport: Box<dyn Transport>,
    line: Line,
    scratch: Mutex<Scratch>,
    /// The first error of an operation: the answer to every later one.
    failure: OnceLock<Error>,
    /// Whether the last word has been said.
    parted: AtomicBool,
    forbidden: Mutex<Vec<Arc<str>>>,
}

impl Member {
    pub(crate) fn new(
        topology: Topology,
        options: GroupOptions,
        transport: Box<dyn Transport>,
    ) -> Self {
        Self {
            topology,
            options,
            transport,
            line: Line::default(),
            scratch: Mutex::default(),
            failure: OnceLock::new(),
            parted: AtomicBool::new(false),
            forbidden: Mutex::default(),
        }
    }

    /// Lets an operation into the line, or says why not. What is refused here leaves the group
    /// as it was.
    pub(crate) fn admit(&self, contract: &Contract) -> Result<Ticket> {
        if let Some(reason) = self.forbidden().last() {
            return Err(Error::new(
                Kind::Misuse,
                format!(
                    "rank {} called {contract} where collectives are forbidden: {reason}",
                    self.topology.rank()
                ),
            ));
        }
        if let Some(root) = contract.root
            && root >= self.topology.world_size()
        {
            return Err(Error::new(
                Kind::Misuse,
                format!(
                    "rank {} called {contract}, but the ranks are 0 to {}",
                    self.topology.rank(),
                    self.topology.world_size() - 1
                ),
            ));
        }
        self.state()?;
        Ok(self.line.join())
    }

    /// Runs an operation when its turn comes, and delivers the outcome before the next one has
    /// its turn.
    pub(crate) fn perform<T, R>(
        &self,
        ticket: Ticket,
        contract: &Contract,
        body: impl FnOnce(Exchange<'_>) -> Result<T>,
        deliver: impl FnOnce(Result<T>) -> R,
    ) -> R {
        let turn = self.line.turn(ticket);
        deliver(self.exchange(turn.number(), contract, body))
    }

    fn exchange<T>(
        &self,
        sequence: u64,
        contract: &Contract,
        body: impl FnOnce(Exchange<'_>) -> Result<T>,
    ) -> Result<T> {
        self.state()?;
        let _watchdog = Watchdog { member: self };
        let patience = self.options.patience();
        let watch = Watch::new(self.topology.rank(), sequence, contract, patience);
        // Every operation starts by clearing the scratch memory.
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        let exchange = Exchange::new(&*self.transport, contract, watch, &mut scratch);
        body(exchange).inspect_err(|error| self.fail(sequence, error.clone()))
    }

    /// Leaves in good order, after everything that was started.
    pub(crate) fn close(&self) {
        let ticket = self.line.join();
        let _turn = self.line.turn(ticket);
        self.part(&Farewell::Goodbye);
    }

    /// Leaves because the last handle is gone; waits a moment for what was started.
    pub(crate) fn leave(&self) {
        if thread::panicking() {
            self.abandon();
        } else if self.line.is_idle_within(LINGER) {
            self.part(&Farewell::Goodbye);
        } else {
            self.fail(
                self.line.serving(),
                Error::about(
                    Kind::PeerLost,
                    vec![self.topology.rank()],
                    format!(
                        "{} dropped its group while operations that it had started were pending; \
                         wait for them, or close the group",
                        self.transport.peers()[self.topology.rank()]
                    ),
                ),
            );
        }
    }

    pub(crate) fn forbid(&self, reason: Arc<str>) {
        self.forbidden().push(reason);
    }

    pub(crate) fn allow(&self, reason: &Arc<str>) {
        let mut forbidden = self.forbidden();
        if let Some(index) = forbidden.iter().rposition(|x| Arc::ptr_eq(x, reason)) {
            forbidden.remove(index);
        }
    }

    fn state(&self) -> Result<()> {
        if let Some(error) = self.failure.get() {
            return Err(error.clone());
        }
        if self.parted.load(Ordering::Acquire) {
            return Err(Error::new(
                Kind::Closed,
                format!(
                    "the group of rank {} is closed; collectives must come before close()",
                    self.topology.rank()
                ),
            ));
        }
        Ok(())
    }

    fn abandon(&self) {
        let error = Error::about(
            Kind::PeerLost,
            vec![self.topology.rank()],
            format!(
                "{} is lost: it panicked",
                self.transport.peers()[self.topology.rank()]
            ),
        );
        self.fail(self.line.serving(), error);
    }

    fn fail(&self, sequence: u64, error: Error) {
        if self.failure.set(error.clone()).is_ok() {
            self.part(&Farewell::Abort(Abort { sequence, error }));
        }
    }

    fn part(&self, farewell: &Farewell) {
        if !self.parted.swap(true, Ordering::AcqRel) {
            self.transport.farewell(farewell);
        }
    }

    fn forbidden(&self) -> MutexGuard<'_, Vec<Arc<str>>> {
        // A list of reasons is whole at every moment.
        self.forbidden
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Member")
            .field("topology", &self.topology)
            .field("transport", &self.transport.kind())
            .field("operations", &self.line.serving())
            .field("failure", &self.failure.get())
            .finish_non_exhaustive()
    }
}

/// Tells the others when an operation panics, which leaves them in the middle of it.
struct Watchdog<'a> {
    member: &'a Member,
}

impl Drop for Watchdog<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.member.abandon();
        }
    }
}

/// How long dropping the last handle waits for operations that were started.
const LINGER: Duration = Duration::from_secs(1);
