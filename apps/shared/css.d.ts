// Styles are taken in for what they do.
declare module "*.css";
