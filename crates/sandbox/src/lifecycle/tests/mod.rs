//! Whole lives in a simulated pod.

macro_rules! life {
    ($(#[$attribute:meta])* async fn $name:ident() $body:block) => {
        $(#[$attribute])*
        #[tokio::test(start_paused = true)]
        async fn $name() {
            tokio::task::LocalSet::new().run_until(async $body).await;
        }
    };
}

mod basic;
mod before;
mod changes;
mod chaos;
mod hooks;
mod images;
mod probes;
mod sidecars;
