//! The texts of panics, and the aborts that they cause.

use std::{
    cell::RefCell,
    panic::{self, PanicHookInfo},
    sync::{Arc, Once, Weak, mpsc},
    thread,
    time::Duration,
};

use accelerator_host::sync::Mutex;

use super::rank_state::RankState;

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
            let _ = LAST_PANIC.try_with(|said| {
                if let Ok(mut said) = said.try_borrow_mut() {
                    *said = Some(text);
                }
            });
            earlier(info);
        }));
    });
}

/// The text of the panic of this thread, which unwinds.
pub(super) fn last_panic() -> String {
    let said = LAST_PANIC.try_with(|said| said.try_borrow().ok().and_then(|said| said.clone()));
    match said.ok().flatten() {
        Some(text) => text,
        None => "it panicked".to_owned(),
    }
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

/// The most characters of a panic's message that are reported.
const MAX_MESSAGE_CHARS: usize = 1000;

/// The time that a panic that aborts waits for the abort to be sent.
const ABORT_SEND_WAIT: Duration = Duration::from_millis(1500);
