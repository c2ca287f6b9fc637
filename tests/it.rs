mod platform;
mod provider;
