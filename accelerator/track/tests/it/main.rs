//! What is tracked, as the programs show it that people look with.

#[cfg(feature = "mlflow")]
mod mlflow;
mod venv;
