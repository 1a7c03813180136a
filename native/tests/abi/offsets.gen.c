extern int ep_x;
