use accelerator::logging::{self, LogRanks};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::prelude::*;

/// Shows warnings on standard error (such as which rank the others wait for), or what `RUST_LOG` selects.
pub fn init_logging() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    // `Accelerator::new` reports an invalid environment, in more detail.
    if let Ok(layer) = logging::layer(LogRanks::Every) {
        // Fails if the program already has a subscriber, which is as good.
        let _ = tracing_subscriber::registry()
            .with(filter)
            .with(layer)
            .try_init();
    }
}
