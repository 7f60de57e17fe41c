//! What requests to the servers of all sinks have in common.

use ureq::Agent;
use ureq::config::ConfigBuilder;
use ureq::typestate::AgentScope;

/// For an agent that gives back every answer, an error's and a redirection's too.
pub(crate) fn config() -> ConfigBuilder<AgentScope> {
    Agent::config_builder()
        .http_status_as_error(false)
        // A request with a body is not sent elsewhere, and a token is not either.
        .max_redirects(0)
        .max_redirects_will_error(false)
        .user_agent(concat!("burn-accelerate-track/", env!("CARGO_PKG_VERSION")))
}
