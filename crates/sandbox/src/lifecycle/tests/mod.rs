//! Complete pod lifecycles with the simulated runtime.

/// A test with the clock paused, within a `LocalSet`.
macro_rules! lifecycle_test {
    ($(#[$attribute:meta])* async fn $name:ident() $body:block) => {
        $(#[$attribute])*
        #[tokio::test(start_paused = true)]
        async fn $name() {
            tokio::task::LocalSet::new().run_until(async $body).await;
        }
    };
}

mod basic;
mod hooks;
mod images;
mod lost_sandbox;
mod probes;
mod random;
mod sidecars;
mod updates;
